"""Fine-tuning on few photos with new classes: the recipe folder/finetune on frames of CamVid."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from caaseg.recipes import load_recipe
from caaseg.training.run import train
from tests.data.trees import CAMVID

NEW_CLASSES = {  # -> classes of CamVid
    "flat": (3, 4),  # road, pavement
    "construction": (1, 7),  # building, fence
    "nature": (0, 5),  # sky, tree
    "object": (2, 6, 8, 9, 10),  # poles, signs, cars, people
}


def save_frames(root: Path) -> None:
    """Save 20 training and 20 validation frames of one drive as a folder dataset with four new classes."""
    new_ids = np.full(256, 255, np.uint8)
    for new_id, old_ids in enumerate(NEW_CLASSES.values()):
        new_ids[list(old_ids)] = new_id
    names = sorted(path.stem for path in (CAMVID / "test").glob("Seq05VD_*"))
    for split, chosen in (("train", names[::8][:20]), ("val", names[4::8][:20])):
        for directory in ("images", "masks"):
            (root / directory / split).mkdir(parents=True)
        for name in chosen:
            (image,) = (CAMVID / "test").glob(f"{name}.*")
            (root / "images" / split / image.name).symlink_to(image)
            mask = np.array(Image.open(CAMVID / "testannot" / f"{name}.png"))
            Image.fromarray(new_ids[mask]).save(root / "masks" / split / f"{name}.png")
    (root / "classes.yaml").write_text(f"classes: [{', '.join(NEW_CLASSES)}]\nignore: [255]\n")


@pytest.mark.slow
@pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid")
def test_twenty_photos_with_new_classes_are_enough_and_much_better_than_from_random_weights(tmp_path: Path) -> None:
    save_frames(tmp_path / "data")
    words = ["--data.root", str(tmp_path / "data")]
    tuned = train(load_recipe("folder/finetune", words), tmp_path / "tuned", device="cpu").mean_iou
    random = train(load_recipe("folder/finetune", [*words, "--init-from", "none"]), tmp_path / "random", device="cpu")
    assert tuned is not None
    assert random.mean_iou is not None
    assert tuned > 0.45
    assert tuned > random.mean_iou + 0.1
