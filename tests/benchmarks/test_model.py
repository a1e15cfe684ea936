"""Benchmark of whole models."""

import json
import sys
from pathlib import Path

import pytest
import torch

from caaseg.benchmarks import model as model_benchmark
from caaseg.benchmarks.model import ModelCost, Setting, build, compile_regions, outputs, regions
from caaseg.cli import main
from caaseg.models import Segmenter
from tests.models import mean_head

SETTING = Setting(backbone="resnet50", output_stride=8, batch=2, size=(33, 41), num_classes=4, dtype="float32")


@pytest.mark.parametrize(
    ("name", "losses"),
    [("caa", 1), ("caa:grouped", 1), ("danet", 3), ("torchvision:fcn", 1), ("torchvision:deeplabv3", 1)],
)
def test_every_model_returns_full_size_logits(name: str, losses: int) -> None:
    with torch.device("meta"), torch.no_grad():
        found = outputs(build(name, SETTING).eval()(torch.empty(1, 3, 33, 41)))
    assert len(found) == losses
    assert all(logits.shape == (1, 4, 33, 41) for logits in found)


def test_a_head_of_your_own_is_built_from_its_file() -> None:
    with torch.device("meta"):
        model = build(f"{Path(mean_head.__file__)}:MeanHead", SETTING._replace(backbone="test_resnet"))
    assert isinstance(model, Segmenter)
    assert type(model.head).__name__ == "MeanHead"


@pytest.mark.parametrize(("name", "losses"), [("caa", 2), ("danet", 4), ("torchvision:fcn", 2)])
def test_the_auxiliary_classifier_is_trained_too(name: str, losses: int) -> None:
    with torch.device("meta"), torch.no_grad():
        model = build(name, SETTING._replace(aux=True)).eval()
        assert len(outputs(model(torch.empty(1, 3, 33, 41)))) == losses


def test_regions_are_residual_blocks_and_the_parts_around_them() -> None:
    with torch.device("meta"):
        model = build("fcn", SETTING)
    found = list(regions(model))
    assert [type(region).__name__ for region in found].count("Bottleneck") == 16
    parameters = [parameter for region in found for parameter in region.parameters()]
    assert len(parameters) == len(set(parameters)) == len(list(model.parameters()))


def test_a_model_compiled_by_regions_gives_the_same_outputs() -> None:
    model = build("fcn", SETTING._replace(backbone="test_resnet", aux=True)).eval()
    images = torch.randn(1, 3, 33, 41)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # compilation takes most of a minute
        before = outputs(model(images))
        compile_regions(model)
        after = outputs(model(images))
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_models_of_segmentation_models_pytorch_are_built() -> None:
    pytest.importorskip("segmentation_models_pytorch", reason="segmentation-models-pytorch is not installed")
    setting = SETTING._replace(size=(64, 96))
    with torch.no_grad():
        (logits,) = outputs(build("smp:deeplabv3plus", setting).eval()(torch.randn(1, 3, 64, 96)))
    assert logits.shape == (1, 4, 64, 96)
    with pytest.raises(ValueError, match=r"model is 'smp:nothing'; expected smp: and one of unet, "):
        build("smp:nothing", setting)


@pytest.mark.parametrize(
    ("module", "model", "package"),
    [
        ("segmentation_models_pytorch", "smp:unet", "segmentation-models-pytorch"),
        ("mmseg", "mmseg:psp", "mmseg"),
    ],
)
def test_a_missing_library_is_reported(module: str, model: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ValueError, match=rf"model is '{model}', but the package {package} is not installed; pip "):
        build(model, SETTING)


def test_the_command_measures_several_models(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--models",
        "caa,fcn:plain",
        "--backbone",
        "test_resnet",
        "--batch",
        "2",
        "--sizes",
        "33",
    ]
    arguments += ["--seconds", "0", "--num-classes", "4", "--dtype", "float32", "--device", "cpu", "--rounds", "2"]
    arguments += ["--json", "-"]
    assert main(["benchmark", "model", *arguments]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert [record["model"] for record in content["models"]] == ["caa", "fcn:plain"]
    for record in content["models"]:
        assert min(record["inference_images_per_second"], record["training_images_per_second"]) > 0
        assert record["training_peak_bytes"] > record["inference_peak_bytes"] > 0
    assert content["setting"]["size"] == [33, 33]
    assert {"command", "commit", "hardware", "versions"} <= content.keys()
    assert "fcn:plain" in err


@pytest.mark.slow
def test_models_of_torchvision_are_measured_in_training_and_inference() -> None:
    setting = SETTING._replace(size=(17, 17))
    cost = model_benchmark.measure_model("torchvision:fcn", setting, torch.device("cpu"), seconds=0)
    assert (cost.inference_images_per_second or 0) > (cost.training_images_per_second or 0) > 0


def test_invalid_numbers_are_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "model", "--batch", "0", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "caaseg: --batch is 0; expected greater than or equal to 1\n"

    assert main(["benchmark", "model", "--rounds", "0", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "caaseg: --rounds is 0; expected greater than or equal to 1\n"


def test_the_faster_of_two_measurements_is_used() -> None:
    first = ModelCost("caa", (33, 33), 2.0, 7, None, 5)
    assert first.or_faster(first._replace(training_images_per_second=3.0, inference_images_per_second=4.0)) == (
        "caa", (33, 33), 3.0, 7, 4.0, 5,
    )  # fmt: skip
    assert first.or_faster(first._replace(training_images_per_second=1.0)) == first


def test_inference_is_measured_if_training_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.Tensor, "backward", too_large)
    cost = model_benchmark.measure_model(
        "fcn", SETTING._replace(backbone="test_resnet"), torch.device("cpu"), seconds=0
    )
    assert cost.training_images_per_second is None
    assert (cost.inference_images_per_second or 0) > 0


def test_an_unknown_model_is_rejected(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark", "model", "--models", "danet:grouped", "--device", "cpu"]) == 2
    assert "model is 'danet:grouped'; expected torchvision:fcn" in capsys.readouterr().err
    assert main(["benchmark", "model", "--models", "caa:captured", "--device", "cpu"]) == 2
    assert "model is 'caa:captured'; :captured works for models of caaseg on a GPU" in capsys.readouterr().err
    arguments = ["--models", "torchvision:fcn", "--backbone", "resnet18", "--device", "cpu"]
    assert main(["benchmark", "model", *arguments]) == 2
    assert (
        "'torchvision:fcn' with backbone resnet18; torchvision has it with resnet50 and resnet101"
        in capsys.readouterr().err
    )
    assert main(["benchmark", "model", "--models", "torchvision:lraspp", "--device", "cpu"]) == 2
    known = "torchvision:fcn, torchvision:deeplabv3, smp:NAME, mmseg:NAME, caa:grouped, file.py:Class or one of fcn"
    assert f"model is 'torchvision:lraspp'; expected {known}" in capsys.readouterr().err
