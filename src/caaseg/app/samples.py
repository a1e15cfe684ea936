"""The photo that the app opens on."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from caaseg.app.predictions import AppModel
from caaseg.data.datasets.scenes import Scenes

SAMPLE = Path(__file__).parent.parent / "shipped" / "sample" / "summer-palace.jpg"
SCENE = 96  # index in the test scenes


@dataclass(frozen=True)
class Sample:
    """A photo or a drawn scene."""

    name: str
    attribution: str
    pixel: tuple[float, float]  # selected pixel, vertical and horizontal position as fractions of the photo
    source: Path | None  # None for the drawn scene

    def write(self, path: Path) -> None:
        """Write the image file."""
        if self.source is not None:
            shutil.copyfile(self.source, path)
        else:
            Image.fromarray(Scenes("test")[SCENE].image.permute(1, 2, 0).numpy()).save(path, "PNG")


PHOTO = Sample(
    "summer-palace.jpg",
    "Photo: “Summer Palace” by danielbuechele, CC BY 2.0 (creativecommons.org/licenses/by/2.0)",
    (0.42, 0.53),  # in the sky beside the building, which attends to sky, building and trees
    SAMPLE,
)
DRAWN_SCENE = Sample(
    "scene.png",
    "A synthetic scene: the color of a house is the color of the distant lamp in its row or column.",
    (0.5, 0.5),
    None,
)


def sample_for(models: Sequence[AppModel]) -> Sample:
    """Return the sample photo, or a synthetic scene if all models were trained on such scenes."""
    return DRAWN_SCENE if all(model.classes == Scenes.classes for model in models) else PHOTO
