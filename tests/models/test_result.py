"""Prediction results: all kinds of inputs, drawing, saved files and COCO JSON."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import caaseg
from caaseg.data.importers import import_labels
from caaseg.errors import CaasegError
from caaseg.models.result import ImageInput
from tests.small_models import small_model, varied_model

CLASSES = ("sky", "road", "car")


@pytest.fixture(scope="module")
def model() -> caaseg.Segmenter:
    torch.manual_seed(0)
    made = small_model("fcn", num_classes=3).eval()
    made.config = made.config.replace(classes=CLASSES)
    return made


@pytest.fixture(scope="module")
def pixels() -> np.ndarray:
    coarse = np.random.default_rng(3).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return np.array(Image.fromarray(coarse).resize((50, 40)))


def test_all_kinds_of_images_give_the_same_labels(model: caaseg.Segmenter, pixels: np.ndarray, tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    path = tmp_path / "photo.png"
    images: list[ImageInput] = [str(path), path, Image.fromarray(pixels), pixels, tensor]
    results = model.predict(images)
    assert isinstance(results, list)
    for result in [*results, *model.predict(iter(images)), model.predict(pixels)]:
        assert np.array_equal(result.labels, results[0].labels)
        assert np.array_equal(result.image, pixels)
    assert results[0].labels.shape == (40, 50)
    assert results[0].name == "photo"
    assert results[3].name == "image"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3)), r"an array of float64 of shape \(4, 4, 3\); expected a path"),
        (np.zeros((3, 5, 6), dtype=np.uint8), r"an array of uint8 of shape \(3, 5, 6\); expected a path"),
        (torch.zeros(3, 4, 4), r"a tensor of torch.float32 of shape \(3, 4, 4\); expected a path"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), r"a tensor of torch.uint8 of shape \(1, 3, 4, 4\); expected"),
        (7, "of type int; expected a path"),
        ("nowhere.jpg", "nowhere.jpg: no such file"),
    ],
)
def test_wrong_inputs_raise_an_error_with_a_message(model: caaseg.Segmenter, image: object, message: str) -> None:
    with pytest.raises(CaasegError, match=message):
        model.predict(image)  # type: ignore[call-overload]


def test_masks_shares_and_probabilities_agree_with_the_labels(model: caaseg.Segmenter, pixels: np.ndarray) -> None:
    result = model.predict(pixels, probabilities=True)
    assert sum(result.shares.values()) == pytest.approx(1)
    for name, share in result.shares.items():
        assert result.mask(name).mean() == pytest.approx(share)
    assert result.probabilities is not None
    assert result.probabilities.shape == (3, 40, 50)
    np.testing.assert_allclose(result.probabilities.sum(0), 1, rtol=1e-5)
    assert np.array_equal(result.probabilities.argmax(0), result.labels)
    with pytest.raises(CaasegError, match="no class is called 'bus'; expected any of sky, road, car"):
        result.mask("bus")


def test_a_result_prints_its_size_and_shares(model: caaseg.Segmenter, pixels: np.ndarray) -> None:
    result = model.predict(pixels)
    first, share = next(iter(result.shares.items()))
    assert repr(result).startswith(f"Result(image, {pixels.shape[1]} x {pixels.shape[0]}: {first} {share:.1%}")


def test_the_legend_has_the_color_of_each_class(model: caaseg.Segmenter, pixels: np.ndarray) -> None:
    result = model.predict(pixels)
    plain, legend = result.overlay(), result.overlay(legend=True)
    assert plain.size == (50, 40)
    assert legend.width > 50
    colors = {tuple(color) for color in np.array(legend)[:, 50:].reshape(-1, 3).tolist()}
    assert {result.palette[CLASSES.index(name)] for name in result.shares} <= colors
    shown = Image.open(io.BytesIO(result._repr_png_()))
    assert shown.size == legend.size


def test_saved_files_hold_the_labels_and_are_never_overwritten(
    model: caaseg.Segmenter, pixels: np.ndarray, tmp_path: Path
) -> None:
    result = model.predict(pixels)
    labels, overlay = result.save(tmp_path / "out")
    assert np.array_equal(np.array(Image.open(labels)), result.labels)
    with Image.open(overlay) as opened:
        assert opened.size == (50, 40)
    with pytest.raises(CaasegError, match=r"image_labels\.png: already exists"):
        result.save(tmp_path / "out")


def test_labels_can_be_saved_with_the_values_of_the_training_masks(pixels: np.ndarray, tmp_path: Path) -> None:
    model = varied_model(2, mask_values=(0, 255))
    result = model.predict(pixels)
    labels, _ = result.save(tmp_path / "out", source_values=True)
    found = np.array(Image.open(labels))
    assert set(np.unique(found)) == {0, 255}
    assert np.array_equal(found, 255 * result.labels)
    unknown = varied_model(2).predict(pixels)
    with pytest.raises(CaasegError, match=r"source_values is True, but the values of .* are unknown"):
        unknown.save(tmp_path / "other", source_values=True)
    assert not (tmp_path / "other").exists()


def test_coco_json_is_imported_as_the_same_labels(model: caaseg.Segmenter, pixels: np.ndarray, tmp_path: Path) -> None:
    result = model.predict(pixels)
    (tmp_path / "export").mkdir()
    Image.fromarray(pixels).save(tmp_path / "export" / "image.jpg")
    (tmp_path / "export" / "labels.json").write_text(json.dumps(result.to_coco()))
    import_labels(tmp_path / "export", tmp_path / "data", unlabeled="sky")
    assert np.array_equal(np.array(Image.open(tmp_path / "data/masks/image.png")), result.labels)


def test_coco_json_has_the_area_and_the_bounding_box_of_each_class() -> None:
    labels = np.zeros((4, 6), np.uint8)
    labels[1:3, 2:5] = 1
    result = caaseg.Result(labels, ("sky", "road"), ((0, 0, 0), (9, 9, 9)), np.zeros((4, 6, 3), np.uint8))
    found = {part["category_id"]: (part["area"], part["bbox"]) for part in result.to_coco()["annotations"]}
    assert found == {0: (18, [0, 0, 6, 4]), 1: (6, [2, 1, 3, 2])}  # left, top, width, height


def test_the_shipped_model_is_loaded_by_name_and_logs_its_license(caplog: pytest.LogCaptureFixture) -> None:
    model = caaseg.load_model("camvid")
    assert isinstance(model, caaseg.Segmenter)
    assert "camvid: the license of its weights is CC-BY-NC-4.0; see " in caplog.text
    assert "CC-BY-NC-4.0" in str(model.generate_model_card())
    assert model.config.short_sides == (360, 360, 360)
    result = model.predict(Image.new("RGB", (96, 72), (90, 120, 160)), size="native")
    assert result.labels.shape == (72, 96)
    assert result.classes[0] == "Sky"
    with pytest.raises(CaasegError, match=r"camvidd: no such model; expected .* or a shipped model: camvid"):
        caaseg.load_model("camvidd")
