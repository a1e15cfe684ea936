"""Photos of 12 megapixels: all interfaces predict them at the size of the training images, with the same labels."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import caaseg
from caaseg.cli import main
from caaseg.data.catalogue import open_dataset
from caaseg.evaluation.metrics import ConfusionMatrix
from tests.data.trees import CAMVID

FRAMES, EXPORTED_FRAMES = 8, 3
LARGE = (4032, 3024)  # width and height
MAX_LOSS = 0.03

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not CAMVID.is_dir(), reason="CamVid is not at ../shared/data/camvid"),
]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories small/, large/ and masks/ with frames of CamVid's test split."""
    root = tmp_path_factory.mktemp("photos")
    data = open_dataset("camvid", CAMVID, "test")
    for name in ("small", "large", "masks"):
        (root / name).mkdir()
    for k in range(FRAMES):
        sample = data[k * len(data) // FRAMES]
        image = Image.fromarray(sample.image.permute(1, 2, 0).numpy())
        image.save(root / f"small/{k:02}.png")
        image.resize(LARGE, Image.Resampling.BICUBIC).save(root / f"large/{k:02}.jpg", quality=95)
        Image.fromarray(sample.label.numpy()).save(root / f"masks/{k:02}.png")
    return root


def predict(model: str, photos: list[Path], out: Path) -> dict[str, np.ndarray]:
    """Return the labels that `caaseg predict` writes, by the name of the photo."""
    assert main(["predict", model, *map(str, photos), "--out", str(out), "--device", "cpu"]) == 0
    return {path.stem: np.array(Image.open(out / f"labels/{path.stem}.png")) for path in photos}


def mean_iou(labels: dict[str, np.ndarray], masks: Path) -> float:
    """Return the mean IoU of labels; masks are enlarged to their size."""
    matrix = ConfusionMatrix(11)
    for name, found in labels.items():
        mask = Image.open(masks / f"{name}.png").resize(found.shape[::-1], Image.Resampling.NEAREST)
        matrix.update(torch.from_numpy(found), torch.from_numpy(np.array(mask)))
    return matrix.mean_iou


def test_command_and_python_give_identical_labels_that_score_as_at_the_native_size(
    photos: Path, tmp_path: Path
) -> None:
    large = sorted((photos / "large").iterdir())
    found = predict("camvid", large, tmp_path / "out")
    model = caaseg.load_model("camvid")
    for path, result in zip(large, model.predict(iter(large)), strict=True):
        assert result.labels.shape == LARGE[::-1]
        assert np.array_equal(found[path.stem], result.labels)
    small = {path.stem: model.predict(path).labels for path in sorted((photos / "small").iterdir())}
    scores = [mean_iou(labels, photos / "masks") for labels in (small, found)]
    assert scores[0] > 0.55
    assert abs(scores[1] - scores[0]) < MAX_LOSS


def test_an_exported_model_scores_as_at_the_native_size_and_resizes_photos_too(photos: Path, tmp_path: Path) -> None:
    exported = tmp_path / "camvid.onnx"
    assert main(["export", "camvid", "--out", str(exported)]) == 0
    large = sorted((photos / "large").iterdir())[:EXPORTED_FRAMES]
    found = predict(str(exported), large, tmp_path / "out")
    model = caaseg.load_model(exported)
    for path in large[:1]:
        assert np.array_equal(found[path.stem], model.predict(path).labels)
    small = {path.stem: model.predict(photos / f"small/{path.stem}.png").labels for path in large}
    scores = [mean_iou(labels, photos / "masks") for labels in (small, found)]
    assert abs(scores[1] - scores[0]) < MAX_LOSS
