"""Files that the examples of the README and of the documentation name, in the current directory."""

from pathlib import Path

from PIL import Image

import caaseg


def model_and_photos() -> None:
    """Write the model `my-model` and the directory `photos`."""
    model = caaseg.create_model(
        "caa",
        backbone="test_efficientnet",
        num_classes=3,
        classes=["road", "tree", "sky"],
        channels=16,
        key_channels=4,
        gate_width=8,
    )
    model.save_pretrained("my-model")
    Path("photos").mkdir()
    Image.linear_gradient("L").resize((90, 70)).save("photos/a.jpg")


def model_and_calibration_photos() -> None:
    """Write the model `my-model` and the directories `photos` and `more-photos`, the latter for calibration."""
    model_and_photos()
    Path("more-photos").mkdir()
    for k in range(8):
        Image.linear_gradient("L").rotate(20 * k).resize((90, 70)).save(f"more-photos/{k}.jpg")


def sample_photo() -> None:
    """Link the sample photo at its path in a clone."""
    here = Path("src/caaseg/shipped")
    here.mkdir(parents=True)
    (here / "sample").symlink_to(Path(caaseg.__file__).parent / "shipped" / "sample")
