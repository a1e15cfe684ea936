"""Batch normalization folded into convolutions: a folded model has the same outputs and no batch normalization."""

import shutil
from collections.abc import Callable
from statistics import geometric_mean

import pytest
import torch
from torch import Tensor, nn

import caaseg
from caaseg.models import folding
from caaseg.models.backbones import Backbone, Features
from caaseg.models.folding import PlainBlock, ReLUConvolution, compile_for_inference, fold_batch_norm
from caaseg.models.fused_norm import fuse_batch_norm
from tests.small_models import small_model

SMALL = {"num_classes": 4, "channels": 12, "key_channels": 4, "gate_width": 8}


def randomize_batch_norm(model: nn.Module) -> None:
    for norm in norms(model):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        nn.init.normal_(norm.running_mean, 0, 0.1)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.1)


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("head", "backbone", "options"),
    [
        ("caa", "test_resnet", {"aux": True, "decoder": True}),
        ("danet", "test_efficientnet", {}),  # its batch norms contain activations
        *((head, "test_resnet", {}) for head in ("nonlocal", "ccnet", "emanet", "ann", "encnet", "ocr")),
        ("encnet", "test_resnet", {"lateral": True, "output_stride": 8}),
        pytest.param("axial_se", "resnet18", {"resnet_variant": "authors"}, marks=pytest.mark.slow),
        ("fcn", "test_resnet", {"input_upsampling": 1.5}),
        ("fcn", "resnet26d", {"output_stride": 8}),  # with pooling in its shortcuts
    ],
)
def test_a_folded_model_gives_the_same_outputs(head: str, backbone: str, options: dict[str, object]) -> None:
    model = caaseg.create_model(head, backbone=backbone, **SMALL, **options).double()  # type: ignore[arg-type]
    randomize_batch_norm(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    folded = fold_batch_norm(model)
    images = torch.randn(2, 3, 40, 51, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        expected, found = model(images), folded(images)
    torch.testing.assert_close(found.logits, expected.logits)
    for name, logits in expected.branches.items():
        torch.testing.assert_close(found.branches[name], logits)
    assert len(norms(model)) > 3
    assert not norms(folded)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # a copy was folded


class SharedConvolution(Backbone):
    """A backbone in which a function, or a hook, reads a convolution beside the batch norm that follows it.

    Args:
        shared: how the output of the convolution is used a second time.
    """

    coarse_channels, fine_channels, mean, std = 8, None, (0.0,) * 3, (1.0,) * 3

    def __init__(self, shared: str) -> None:
        super().__init__()
        self.shared = shared
        self.convolution = nn.Conv2d(3, 4, 3, stride=8)
        self.norm = nn.BatchNorm2d(4)
        self.seen: list[Tensor] = []
        if shared == "hook":
            self.convolution.register_forward_hook(self.see_output)
        if shared == "hook before":
            self.norm.register_forward_pre_hook(self.see_input)

    def see_output(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        self.seen.append(output)

    def see_input(self, module: nn.Module, given: tuple[Tensor, ...]) -> None:
        self.seen.append(given[0])

    def forward(self, images: Tensor) -> Features:
        self.seen.clear()
        features = self.convolution(images)
        normed = self.norm(features)
        match self.shared:
            case "sum":
                other = features + 1
            case "method":
                other = features.sigmoid()
            case "list":
                return Features(torch.cat([normed, features], 1), None)
            case _:
                other = self.seen[0]
        return Features(torch.cat([normed, other], 1), None)


@pytest.mark.parametrize("shared", ["sum", "method", "list", "hook", "hook before"])
def test_a_convolution_that_is_read_elsewhere_is_not_folded(shared: str) -> None:
    model = caaseg.create_model("fcn", backbone=SharedConvolution(shared), num_classes=4, channels=12).double()
    randomize_batch_norm(model)
    images = torch.randn(2, 3, 40, 51, dtype=torch.float64)
    folded = fold_batch_norm(model)
    with torch.no_grad():
        torch.testing.assert_close(folded(images).logits, model.eval()(images).logits)
    assert norms(folded) == norms(folded.backbone)  # the batch norms of the head are folded
    assert norms(folded)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs g++ on a CPU")
@pytest.mark.slow
def test_a_folded_model_compiled_for_inference_gives_the_same_outputs() -> None:
    model = caaseg.create_model("fcn", backbone="test_resnet", decoder=True, **SMALL)  # type: ignore[arg-type]
    randomize_batch_norm(model)
    folded = fold_batch_norm(model)
    batches = [torch.randn(1, 3, 40, 51), torch.randn(2, 3, 33, 64)]
    with torch.inference_mode():
        expected = [folded(images).logits for images in batches]
        compile_for_inference(folded)
        found = [folded(images).logits for images in batches]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0  # it did compile


@pytest.mark.parametrize(("head", "backbone"), [("fcn", "resnet18"), ("caa", "test_efficientnet")])
def test_models_with_fused_batch_norm_are_folded(head: str, backbone: str) -> None:
    model = caaseg.create_model(head, backbone=backbone, **SMALL).double()  # type: ignore[arg-type]
    randomize_batch_norm(model)
    images = torch.randn(2, 3, 40, 51, dtype=torch.float64)
    with torch.no_grad():
        expected = model.eval()(images).logits
        fuse_batch_norm(model)
        torch.testing.assert_close(fold_batch_norm(model)(images).logits, expected)


def test_a_large_convolution_in_parts_gives_the_same_outputs() -> None:
    convolution = nn.Conv2d(600, 513, 3, stride=2, padding=1, dilation=2, dtype=torch.float64)
    assert convolution.weight.numel() > folding.CACHED_WEIGHTS
    features = torch.randn(2, 600, 6, 7, dtype=torch.float64)
    with torch.no_grad():
        expected = convolution(features).relu()
        added = torch.randn_like(expected)
        folded = ReLUConvolution(convolution)
        torch.testing.assert_close(folded(features), expected)
        torch.testing.assert_close(folded(features, added), (convolution(features) + added).relu())


def test_a_folded_resnet_consists_of_convolutions_only() -> None:
    model = caaseg.create_model("caa", backbone="resnet50", **SMALL)  # type: ignore[arg-type]
    folded = fold_batch_norm(model)
    blocks = [module for module in folded.modules() if isinstance(module, PlainBlock)]
    assert len(blocks) == 16
    assert not [module for module in folded.backbone.modules() if isinstance(module, nn.ReLU)]
    shortcuts = [module for block in blocks for module in block.children() if isinstance(module, nn.Sequential)]
    assert len(shortcuts) == 4
    assert all(part.bias is None for shortcut in shortcuts for part in shortcut if isinstance(part, nn.Conv2d))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compiled", [False, True])
def test_a_folded_model_on_a_gpu_is_as_accurate_in_16_bits_as_the_plain_model(compiled: bool) -> None:
    """The two models round after different operations. So the test compares the mean errors of several models."""
    plain, found = zip(*(errors_in_16_bits(compiled) for _ in range(6)), strict=True)
    assert geometric_mean(found) < 1.2 * geometric_mean(plain) < 0.05


def errors_in_16_bits(compiled: bool) -> tuple[float, float]:
    """Return the errors of a random model and of the folded model in bfloat16, relative to float64."""
    model = caaseg.create_model("caa", backbone="resnet50", output_stride=8, num_classes=11).cuda().eval()
    randomize_batch_norm(model)
    images = torch.randn(2, 3, 97, 129, device="cuda").contiguous(memory_format=torch.channels_last)
    folded = fold_batch_norm(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if compiled:
        compile_for_inference(folded)
    with torch.inference_mode():
        exact = model.double()(images.double()).logits
        model.float()
        with torch.autocast("cuda", torch.bfloat16):
            plain, found = model(images).logits, folded(images).logits

    def error(logits: torch.Tensor) -> float:
        return float((logits.double() - exact).norm() / exact.norm())

    return error(plain), error(found)


def test_a_folded_model_is_cached_until_a_weight_changes() -> None:
    model = small_model().eval()
    before = folding.folded(model)
    assert folding.folded(model) is before
    changes: list[Callable[[], object]] = [
        lambda: nn.init.normal_(model.classifier.weight),
        lambda: model.classifier.weight.data.add_(1),
        lambda: model.load_state_dict({name: tensor + 1 for name, tensor in model.state_dict().items()}),
        lambda: norms(model)[0].running_mean.add_(1),  # type: ignore[union-attr]
    ]
    for change in changes:
        change()
        after = folding.folded(model)
        assert after is not before
        torch.testing.assert_close(after.classifier.weight, model.classifier.weight)
        before = after
    assert not any("folded" in name for name in model.state_dict())
