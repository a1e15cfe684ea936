"""Exported files say what the model says, at any size, or are not there."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn

import caaseg
from caaseg.cli import main
from caaseg.data.transforms import normalize
from caaseg.models import export
from caaseg.models.onnx import OnnxModel

SHIPPED = Path(__file__).parents[2] / "models"  # learned on CamVid
LARGEST = 2.5  # of the logits of the pictures that statistics are taken of; differences are in proportion to it
SMALL: dict[str, Any] = {"num_classes": 4, "channels": 16, "key_channels": 4, "gate_width": 8}


def build(head: str, backbone: str, **options: Any) -> caaseg.Segmenter:
    """A network as well conditioned as a trained one, of which every weight and every statistic is drawn.

    So a wrong layer shows. The statistics of its normalizations are those of a batch of pictures, as training would
    leave them: with those it begins with (means 0, variances 1) the features of an EfficientNet-B0 shrink to 1e-3 and
    its logits to 1e-4, where nothing could differ. It is then shown pictures of the same kind: on noise its logits
    come to 1e5, and torch in float32 is about as far from torch in float64 as an exported file is.
    """
    torch.manual_seed(0)
    model = caaseg.create_model(head, backbone=backbone, **{**SMALL, **options})
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            nn.init.uniform_(tensor, -0.1, 0.1)
        elif tensor.dim() == 1:  # factors of batch norm; with those around 1 float32 itself is 2e-3 off
            nn.init.uniform_(tensor, 0.4, 0.6)
        elif tensor.dim() == 0:  # DANet's, which are zero at first and would hide its attentions
            nn.init.constant_(tensor, 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    images = familiar()
    with torch.no_grad():
        model.train()(normalized(model, images))
        largest = model.eval()(normalized(model, images)).logits.abs().max()
        for tensor in model.classifier.parameters():
            tensor.mul_(LARGEST / largest)
    return model


def familiar() -> torch.Tensor:
    """The pictures that statistics and the size of logits are taken of."""
    return export.scene_images(32, 160, 160, torch.Generator().manual_seed(1))


def normalized(model: caaseg.Segmenter, images: torch.Tensor) -> torch.Tensor:
    return normalize(images.to(torch.uint8), model.backbone.mean, model.backbone.std)


def assert_agrees(run: Any, model: caaseg.Segmenter, smallest: int = 1) -> None:
    """Under 1e-3 of difference on logits, over 10 random sizes, and where logits are known to be large."""
    rng = torch.Generator()
    rng.seed()
    given = [familiar()]
    for _ in range(10):
        batch, (height, width) = int(torch.randint(1, 4, ())), torch.randint(smallest, 200, (2,)).tolist()
        given.append(export.scene_images(batch, height, width, rng))
    largest = 0.0
    for images in given:
        with torch.no_grad():
            expected = model(normalized(model, images)).logits
        found = run(images)
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < 1e-3, images.shape
        largest = max(largest, float(expected.abs().max()))
    assert largest > 1  # something that could differ


def agree(head: str, backbone: str, path: Path, **options: Any) -> None:
    model = build(head, backbone, **options)
    check = export.export_model(model, path)
    assert len(set(check.sizes)) == 10
    assert check.difference < 1e-3
    assert_agrees(OnnxModel(path), model)


def test_onnx_agrees_with_a_danet_on_a_resnet(tmp_path: Path) -> None:
    agree("danet", "test_resnet", tmp_path / "model.onnx", output_stride=8)


def test_onnx_agrees_with_a_caa_on_an_efficientnet(saved: Path) -> None:
    assert_agrees(OnnxModel(saved / "m.onnx"), caaseg.load_model(saved / "model"))


def test_onnx_agrees_with_a_model_that_enlarges_what_it_sees(tmp_path: Path) -> None:
    model = build("fcn", "test_resnet", input_upsampling=1.5)
    export.export_model(model, tmp_path / "m.onnx")  # which compares them at ten sizes
    run, plain = OnnxModel(tmp_path / "m.onnx"), build("fcn", "test_resnet")
    plain.load_state_dict(model.state_dict())
    for height, width in ((90, 121), (17, 64)):
        images = torch.randint(0, 256, (1, 3, height, width), dtype=torch.uint8)
        inputs = normalize(images, model.backbone.mean, model.backbone.std)
        with torch.no_grad():
            expected, other = model(inputs).logits, plain(inputs).logits
        torch.testing.assert_close(run(images.float()), expected, rtol=1e-3, atol=1e-2)
        assert (expected - other).abs().max() > 0.5


@pytest.mark.parametrize(
    "name", ["camvid-caa-efficientnet-b0", pytest.param("camvid-caa-resnet18", marks=pytest.mark.slow)]
)
def test_onnx_agrees_with_a_trained_caa(name: str, tmp_path: Path) -> None:
    model = caaseg.load_model(SHIPPED / name)
    check = export.export_model(model, tmp_path / "model.onnx")
    assert check.difference < 1e-3
    assert_agrees(OnnxModel(tmp_path / "model.onnx"), model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "backbone"), [("caa", "resnet50"), ("danet", "resnet50"), ("danet", "efficientnet_b0")]
)
def test_onnx_agrees_with_larger_models(head: str, backbone: str, tmp_path: Path) -> None:
    agree(head, backbone, tmp_path / "model.onnx", output_stride=8, channels=64, key_channels=16)


@pytest.mark.slow
def test_onnx_agrees_with_a_caa_on_a_large_efficientnet_as_far_as_float32_goes(tmp_path: Path) -> None:
    """Not to 1e-3: drawn weights are badly conditioned, and float32 itself is as far off. Trained ones are not."""
    model = build("caa", "efficientnet_b0", output_stride=8, channels=64, key_channels=16)
    check = export.export_model(model, tmp_path / "model.onnx")
    assert check.difference < max(1e-3, export.MAX_ROUNDING_FACTOR * check.rounding)
    assert check.rounding < 0.01 * check.largest_logit  # it does say something


@pytest.mark.slow
@pytest.mark.parametrize("head", ["fcn", "axial", "axial_se", "self_attention", "channelized_self_attention"])
def test_onnx_agrees_with_the_other_heads(head: str, tmp_path: Path) -> None:
    agree(head, "resnet18", tmp_path / "model.onnx")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and what the command makes of it."""
    root = tmp_path_factory.mktemp("export")
    named = {"classes": list("abcd"), "palette": [(k, 0, 255 - k) for k in range(4)]}
    more = {"decoder": True, "aux": True, "implementation": "grouped", "groups": 3}
    build("caa", "test_efficientnet", **named, **more).save_pretrained(root / "model")
    assert main(["export", str(root / "model"), "--out", str(root / "m.onnx"), "--json", str(root / "m.json")]) == 0
    return root


def test_the_file_describes_itself(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model", "m.onnx", "m.json"}  # one file, nothing beside it
    proto = onnx.load(saved / "m.onnx")
    onnx.checker.check_model(proto)
    shapes = [
        [dimension.dim_param or dimension.dim_value for dimension in value.type.tensor_type.shape.dim]
        for value in (proto.graph.input[0], proto.graph.output[0])
    ]
    assert shapes == [["batch", 3, "height", "width"], ["batch", 4, "height", "width"]]
    assert (proto.graph.input[0].name, proto.graph.output[0].name) == ("images", "logits")
    about = json.loads(next(entry.value for entry in proto.metadata_props if entry.key == "caaseg"))
    assert about["classes"] == list("abcd")
    assert about["palette"][1] == [1, 0, 254]
    assert about["caaseg"] == caaseg.__version__
    assert (about["mean"], about["std"]) == ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    assert (about["head"], about["backbone"], about["output_stride"]) == ("caa", "test_efficientnet", 16)
    told = json.loads((saved / "m.json").read_text())
    assert told["difference"] < 1e-3
    assert len(told["sizes"]) == 10


def test_predict_runs_the_file_as_it_runs_the_model(saved: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k, (height, width) in enumerate([(70, 90), (1, 1), (5, 130)]):
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(tmp_path / f"{k}.png")
    for model, out in (("m.onnx", "a"), ("model", "b")):
        words = [str(saved / model), str(tmp_path / "*.png"), "--out", str(tmp_path / out), "--probabilities"]
        assert main(["predict", *words, "--scales", "0.5,1.0", "--flip", "--window", "64", "--device", "cpu"]) == 0
    for k in range(3):
        ours, theirs = (np.load(tmp_path / out / f"probabilities/{k}.npy") for out in "ab")
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
        with Image.open(tmp_path / f"a/labels/{k}.png") as image:
            assert image.getpalette()[:6] == [0, 0, 255, 1, 0, 254]  # type: ignore[index]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--output-stride", "8"], "m.onnx: --output-stride does not apply to an exported model; leave it out"),
        (["--precision", "bf16"], "m.onnx: --precision bf16 does not apply to an exported model; leave it out"),
        (["--compiled"], "m.onnx: --compiled does not apply to an exported model; leave it out"),
    ],
)
def test_what_was_fixed_cannot_be_asked_for(
    saved: Path, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(saved / "m.onnx"), "a.png", "--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_no_exported_model_are_refused(saved: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    with pytest.raises(ValueError, match=r"m\.onnx: no such file; expected a model that caaseg export wrote"):
        OnnxModel(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"m\.onnx: onnxruntime cannot read it"):
        OnnxModel(path)
    proto = onnx.load(saved / "m.onnx")
    for value in ("{}", "[]", "nothing", '{"num_classes": 4, "classes": ["a"], "palette": null}'):
        del proto.metadata_props[:]
        onnx.helper.set_model_props(proto, {"caaseg": value})
        onnx.save(proto, path)
        with pytest.raises(ValueError, match=r"m\.onnx: an ONNX model without the metadata of caaseg export"):
            OnnxModel(path)
    del proto.metadata_props[:]
    onnx.save(proto, path)
    with pytest.raises(ValueError, match=r"m\.onnx: an ONNX model without the metadata of caaseg export"):
        OnnxModel(path)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch.export.load, about its own parts
@pytest.mark.parametrize(
    ("backbone", "input_upsampling"),
    [
        ("test_resnet", 1.0),
        pytest.param("test_resnet", 1.3, marks=pytest.mark.slow),
        pytest.param("resnet18", 1.0, marks=pytest.mark.slow),
    ],
)
def test_a_torch_program_agrees_with_the_model(backbone: str, input_upsampling: float, tmp_path: Path) -> None:
    model = build("caa", backbone, input_upsampling=input_upsampling)
    check = export.export_model(model, tmp_path / "m.pt2", "torch")
    assert check.difference < 1e-5
    extra = {"caaseg.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    about = json.loads(extra["caaseg.json"])
    assert (about["num_classes"], about["smallest_side"]) == (4, 17)
    assert_agrees(program, model, smallest=17)


def test_a_file_that_disagrees_is_not_left_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    build("fcn", "test_efficientnet").save_pretrained(tmp_path / "model")
    for name in ("TOLERANCE", "MAX_ROUNDING_FACTOR"):
        monkeypatch.setattr(export, name, -1.0)  # which nothing meets
    assert main(["export", str(tmp_path / "model"), "--out", str(tmp_path / "m.pt2"), "--format", "torch"]) == 2
    captured = capsys.readouterr()
    assert "m.pt2: not written: its logits differ from the model's by up to" in captured.err
    assert captured.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_network_that_multiplies_rounding_is_exported_all_the_same(tmp_path: Path) -> None:
    """Of logits of 1e6, float32 itself leaves more than 1e-3 uncertain; a wrong layer is noticed there too."""
    model = build("fcn", "test_resnet")
    with torch.no_grad():
        model.classifier.weight.mul_(1e6 / LARGEST)
    check = export.export_model(model, tmp_path / "m.onnx")
    assert check.largest_logit > 1e5
    assert check.rounding > 1e-3
    assert check.difference < export.MAX_ROUNDING_FACTOR * check.rounding
    with torch.no_grad():
        model.classifier.weight[0, 0] *= 1.01
    with pytest.raises(ValueError, match=r"times the rounding error of .*; report this as a bug"):
        export.check_export(export.Deployed(model), OnnxModel(tmp_path / "m.onnx"), 17, Path("m.onnx"))


def test_a_wrong_layer_is_noticed(saved: Path) -> None:
    """The check itself, against a model of which one bias is another."""
    model = caaseg.load_model(saved / "model")
    other = export.Deployed(model)
    with torch.no_grad():
        other.model.head.entry[1].running_mean += 0.05  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="its logits differ from the model's"):
        export.check_export(export.Deployed(model), other, 17, Path("m.onnx"))


def test_the_ending_says_the_format(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, words in (("m.pt", ["--format", "torch"]), ("m.pt2", [])):
        assert main(["export", str(saved / "model"), "--out", str(tmp_path / name), *words]) == 2
        assert f"{name}: expected a name that ends in" in capsys.readouterr().err


def test_what_to_install_is_said(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, missing in (
        (["export", str(saved / "model"), "--out", str(tmp_path / "m.onnx")], "onnx"),
        (["predict", str(saved / "m.onnx"), "a.png", "--out", str(tmp_path / "out")], "onnxruntime"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
        assert main(words) == 2
        error = capsys.readouterr().err
        assert f"needs {missing}, which is not installed; install it with: pip install 'caaseg[export]'" in error
        assert error.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
