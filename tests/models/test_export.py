"""Exported files give the outputs of the model for images of any size."""

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
from caaseg.errors import CaasegError
from caaseg.models import export, load_model
from caaseg.models.heads.base import Head, HeadFeatures
from caaseg.models.heads.fcn import FCNHead
from caaseg.models.onnx import OnnxModel
from tests import processes

MAX_LOGIT = 2.5  # of the calibration images; rounding errors are in proportion to it
SMALL: dict[str, Any] = {"num_classes": 4, "channels": 16, "key_channels": 4, "gate_width": 8}


def build(head: str | type[Head], backbone: str, **options: Any) -> caaseg.Segmenter:
    """Return a model with random weights that is as well conditioned as a trained one.

    Its batch norm statistics are those of scenes. With the initial statistics, the logits of an EfficientNet-B0 are
    about 1e-4, too small to differ; and on noise instead of scenes they reach 1e5, with large rounding errors.
    """
    torch.manual_seed(0)
    model = caaseg.create_model(head, backbone=backbone, **{**SMALL, **options})
    for name, tensor in model.named_parameters():
        if name.endswith("bias"):
            nn.init.uniform_(tensor, -0.1, 0.1)
        elif tensor.dim() == 1:  # factors of batch norm; around 1, the rounding error in float32 is 2e-3
            nn.init.uniform_(tensor, 0.4, 0.6)
        elif tensor.dim() == 0:  # the scales of DANet, whose initial zeros would disable its attentions
            nn.init.constant_(tensor, 0.5)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    images = calibration_images()
    with torch.no_grad():
        model.train()(normalized(model, images))
        largest = model.eval()(normalized(model, images)).logits.abs().max()
        for tensor in model.classifier.parameters():
            tensor.mul_(MAX_LOGIT / largest)
    return model


def calibration_images() -> torch.Tensor:
    """Return the images for the batch norm statistics and the scale of the logits."""
    return export.scene_images(12, 160, 160, torch.Generator().manual_seed(1))


def normalized(model: caaseg.Segmenter, images: torch.Tensor) -> torch.Tensor:
    return normalize(images.to(torch.uint8), model.backbone.mean, model.backbone.std)


def assert_agrees(run: Any, model: caaseg.Segmenter, smallest: int = 1) -> None:
    """Compare logits at several sizes, and on the calibration images, where logits are large."""
    rng = torch.Generator().manual_seed(2)
    given = [calibration_images()]
    for batch, height, width in ((1, smallest, smallest), (3, 150, smallest), (2, 47, 131)):
        given.append(export.scene_images(batch, height, width, rng))
    largest = 0.0
    for images in given:
        with torch.no_grad():
            expected = model(normalized(model, images)).logits
        found = run(images)
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) < 1e-3, images.shape
        largest = max(largest, float(expected.abs().max()))
    assert largest > 1  # large enough to differ


@pytest.mark.slow
def test_onnx_agrees_with_a_trained_caa(tmp_path: Path) -> None:
    model = load_model("camvid")
    check = export.export_model(model, tmp_path / "model.onnx")
    assert check.difference < 1e-3
    assert_agrees(OnnxModel(tmp_path / "model.onnx"), model)


@pytest.mark.slow
def test_onnx_agrees_with_a_caa_on_a_large_efficientnet_up_to_rounding(tmp_path: Path) -> None:
    # Rounding errors exceed 1e-3 with random weights, which are badly conditioned; trained weights are not.
    model = build("caa", "efficientnet_b0", output_stride=8, channels=64, key_channels=16)
    check = export.export_model(model, tmp_path / "model.onnx")
    assert check.difference < max(1e-3, export.MAX_ROUNDING_FACTOR * check.rounding)
    assert check.rounding < 0.01 * check.largest_logit


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a saved model, its ONNX file and the JSON output of the export command."""
    root = tmp_path_factory.mktemp("export")
    named = {"classes": list("abcd"), "palette": [(k, 0, 255 - k) for k in range(4)]}
    more = {
        "decoder": True,
        "decoder_channels": 16,
        "aux": True,
        "implementation": "grouped",
        "groups": 3,
        "input_upsampling": 1.5,
    }
    build("caa", "test_efficientnet", **named, **more).save_pretrained(root / "model")
    assert main(["export", str(root / "model"), "--out", str(root / "m.onnx"), "--json", str(root / "m.json")]) == 0
    return root


def test_the_onnx_file_describes_its_inputs_outputs_and_classes(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"model", "m.onnx", "m.json"}  # one file, no others
    proto = onnx.load(saved / "m.onnx")
    onnx.checker.check_model(proto)
    assert "GlobalAveragePool" in {node.op_type for node in proto.graph.node}  # onnxruntime's ReduceMean is slow
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
    report = json.loads((saved / "m.json").read_text())
    assert report["difference"] < 1e-3
    assert len(report["sizes"]) == 10


def test_predict_gives_the_same_results_for_the_file_and_the_model(saved: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for k, (height, width) in enumerate([(70, 90), (1, 1), (5, 130)]):
        Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(tmp_path / f"{k}.png")
    for model, out in (("m.onnx", "a"), ("model", "b")):
        arguments = [str(saved / model), str(tmp_path / "*.png"), "--out", str(tmp_path / out), "--probabilities"]
        assert main(["predict", *arguments, "--scales", "0.5,1.0", "--flip", "--window", "64", "--device", "cpu"]) == 0
    for k in range(3):
        ours, theirs = (np.load(tmp_path / out / f"probabilities/{k}.npy") for out in "ab")
        np.testing.assert_allclose(ours, theirs, atol=2e-3)
        with Image.open(tmp_path / f"a/labels/{k}.png") as image:
            assert image.getpalette()[:6] == [0, 0, 255, 1, 0, 254]  # type: ignore[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output-stride", "8"], "m.onnx: --output-stride does not apply to an exported model; leave it out"),
        (["--precision", "bf16"], "m.onnx: --precision bf16 does not apply to an exported model; leave it out"),
        (["--compiled"], "m.onnx: --compiled does not apply to an exported model; leave it out"),
    ],
)
def test_options_that_do_not_apply_to_exported_models_are_rejected(
    saved: Path, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(saved / "m.onnx"), "a.png", "--out", str(tmp_path / "out"), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_files_that_are_not_exported_models_are_rejected(saved: Path, tmp_path: Path) -> None:
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


@pytest.mark.filterwarnings("ignore::FutureWarning")  # torch.export.load warns about its own code
@pytest.mark.parametrize(
    ("head", "backbone", "input_upsampling"),
    [
        ("fcn", "test_efficientnet", 1.0),
        pytest.param("caa", "test_resnet", 1.0, marks=pytest.mark.slow),
        pytest.param("caa", "test_resnet", 1.3, marks=pytest.mark.slow),
    ],
)
def test_a_torch_program_agrees_with_the_model(
    head: str, backbone: str, input_upsampling: float, tmp_path: Path
) -> None:
    model = build(head, backbone, input_upsampling=input_upsampling)
    check = export.export_model(model, tmp_path / "m.pt2", "torch")
    assert check.difference < 1e-5
    extra = {"caaseg.json": ""}
    program = torch.export.load(tmp_path / "m.pt2", extra_files=extra).module()
    about = json.loads(extra["caaseg.json"])
    assert (about["num_classes"], about["smallest_side"]) == (4, 17)
    assert_agrees(program, model, smallest=17)


def write_to_a_full_disk(path: Path) -> None:
    program = torch.export.export(nn.Identity(), (torch.zeros(2),))
    try:
        export._write_torch(program, "{}", path)
    except OSError:
        sys.exit(3)


def test_a_full_disk_does_not_abort_the_process(tmp_path: Path) -> None:
    (tmp_path / "m.pt2").symlink_to("/dev/full")
    assert processes.run(write_to_a_full_disk, tmp_path / "m.pt2") == 3


class DiffersIfExported(FCNHead):
    def forward(self, features: torch.Tensor) -> HeadFeatures:
        output = super().forward(features)
        return output._replace(fused=output.fused * 1.01) if torch.compiler.is_exporting() else output


def test_no_file_is_left_if_its_outputs_differ(tmp_path: Path) -> None:
    model = build(DiffersIfExported, "test_efficientnet")
    with pytest.raises(CaasegError, match=r"m\.pt2: not written: its logits differ from the model's by up to 0\.0"):
        export.export_model(model, tmp_path / "m.pt2", "torch")
    assert list(tmp_path.iterdir()) == []


def test_the_check_allows_for_the_rounding_errors_of_large_logits_but_not_for_wrong_weights() -> None:
    model = build("fcn", "test_resnet")
    with torch.no_grad():
        model.classifier.weight.mul_(1e6 / MAX_LOGIT)  # with rounding errors above the tolerance of 1e-3
    exact = export.Deployed(model).double()

    def run(images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = exact(images.double())
        return logits.float()

    check = export.check_export(export.Deployed(model), run, 17, Path("m.onnx"))
    assert check.largest_logit > 1e5
    assert check.rounding > 1e-3
    assert check.difference < export.MAX_ROUNDING_FACTOR * check.rounding
    with torch.no_grad():
        model.classifier.weight[0, 0] *= 1.01
    with pytest.raises(ValueError, match=r"times the rounding error of .*; report this as a bug"):
        export.check_export(export.Deployed(model), run, 17, Path("m.onnx"))


def test_the_check_detects_one_wrong_statistic(saved: Path) -> None:
    model = load_model(saved / "model")
    other = export.Deployed(model)
    with torch.no_grad():
        other.model.head.entry[1].running_mean += 0.05  # type: ignore[index, union-attr]
    with pytest.raises(ValueError, match="its logits differ from the model's"):
        export.check_export(export.Deployed(model), other, 17, Path("m.onnx"))


def test_the_suffix_must_fit_the_format(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, arguments in (("m.pt", ["--format", "torch"]), ("m.pt2", [])):
        assert main(["export", str(saved / "model"), "--out", str(tmp_path / name), *arguments]) == 2
        assert f"{name}: expected a name that ends in" in capsys.readouterr().err


def test_errors_name_the_missing_package(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, missing in (
        (["export", str(saved / "model"), "--out", str(tmp_path / "m.onnx")], "onnx"),
        (["predict", str(saved / "m.onnx"), "a.png", "--out", str(tmp_path / "out")], "onnxruntime"),
    ):
        monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert f"needs {missing}, which is not installed; install it with: pip install 'caaseg[export]'" in error
        assert error.count("\n") == 1
        assert list(tmp_path.iterdir()) == []
