"""Normalization, sum and ReLU in few passes: what torch's own modules give. Where there is no GPU, interpreted."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import caaseg

pytest.importorskip("triton", reason="triton, whose interpreter runs the kernels here, is not installed")

from caaseg.kernels import batch_norm as normalization_kernels
from caaseg.kernels import launching
from caaseg.models import fused_norm as normalization
from caaseg.models.fused_norm import FusedBatchNorm, fuse_batch_norm

pytestmark = pytest.mark.skipif(
    not (launching.INTERPRETED or torch.cuda.is_available()),
    reason="no GPU, and TRITON_INTERPRET=1 came too late",
)

DEVICE = "cpu" if launching.INTERPRETED else "cuda"
SMALL = {"num_classes": 4, "channels": 12, "key_channels": 4, "gate_width": 8}


def norm_of(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    assert norm.running_mean is not None
    nn.init.normal_(norm.running_mean)
    return norm.to(DEVICE)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1, mean: float = 0) -> Tensor:
    return (torch.randn(shape) * scale + mean).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def run(norm: nn.Module, given: list[Tensor], cotangent: Tensor, relu: bool) -> list[Tensor]:
    """Result and gradients by torch's own functions, or by the fused module."""
    given = [tensor.detach().clone().requires_grad_() for tensor in given]
    if isinstance(norm, FusedBatchNorm):
        result = norm(*given)
    else:
        result = norm(given[0]) + (given[1] if len(given) > 1 else 0)
        result = result.relu() if relu else result
    return [result, *torch.autograd.grad(result, [*given, *norm.parameters()], cotangent)]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((2, 20, 5, 7), torch.float32), ((1, 130, 3, 3), torch.float32), ((3, 16, 33, 40), torch.bfloat16)],
    ids=str,
)
def test_result_gradients_and_statistics_are_those_of_float64(
    shape: tuple[int, int, int, int], dtype: torch.dtype, summed: bool, relu: bool
) -> None:
    norm = norm_of(shape[1])
    wide, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    normalization._fuse(fused, relu=relu)
    # A mean far from zero, where sums of plain squares would cancel.
    given = [drawn(shape, dtype, 2, 30), drawn(shape, dtype)][: 1 + summed]
    cotangent = drawn(shape, dtype)
    found = run(fused, given, cotangent, relu)
    own = run(copy.deepcopy(norm), given, cotangent, relu)
    expected = run(wide, [tensor.double() for tensor in given], cotangent.double(), relu)
    for ours, torchs, exact in zip(found, own, expected, strict=True):
        ours_off, torchs_off = ((one.double() - exact).norm() / exact.norm() for one in (ours, torchs))
        assert ours_off < max(2 * torchs_off, 1e-5 if dtype == torch.float32 else 2e-2)
        assert ours.dtype == torchs.dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(getattr(fused, name).double(), getattr(wide, name).double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_a_result_that_is_given_twice_are_summed(relu: bool) -> None:
    norm = norm_of(20)
    wide, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    normalization._fuse(fused, relu=relu)
    given = [drawn((2, 20, 5, 7)).requires_grad_() for _ in range(2)]
    cotangents = [drawn((2, 20, 5, 7)) for _ in range(2)]
    results = fused(*given, twice=True)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    found = torch.autograd.grad(results, [*given, *fused.parameters()], cotangents)
    exact = [tensor.detach().double() for tensor in given]
    expected = run(wide, exact, sum(cotangents[1:], cotangents[0]).double(), relu)
    for ours, theirs in zip([results[0], *found], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


def test_between_the_blocks_of_a_stage_no_gradient_is_summed_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    model = caaseg.create_model("fcn", backbone="resnet18", **SMALL).to(memory_format=torch.channels_last)  # type: ignore[arg-type, call-overload]
    fuse_batch_norm(model.to(DEVICE))
    launched: list[bool] = []
    kernel = normalization_kernels.sums_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*given: Any, **chosen: Any) -> None:
                launched.append(chosen["twice"])
                kernel[grid](*given, **chosen)

            return launch

    monkeypatch.setattr(normalization_kernels, "sums_kernel", Watched())
    model(drawn((2, 3, 17, 24))).logits.square().mean().backward()
    assert sum(launched) == 4  # one a stage of two blocks


def test_many_parts_are_added_up_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normalization, "ELEMENTS", 64)
    monkeypatch.setattr(normalization, "PROGRAMS", 1056)
    given, cotangent = [drawn((2, 16, 24, 25), scale=2, mean=3)], drawn((2, 16, 24, 25))
    assert normalization._Layout(given[0]).sums_grid[0] > 256
    norm = norm_of(16)
    wide, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    normalization._fuse(fused, relu=True)
    found = run(fused, given, cotangent, True)
    expected = run(wide, [given[0].double()], cotangent.double(), True)
    torch.testing.assert_close([one.double() for one in found], expected, rtol=1e-4, atol=1e-4)


def test_a_first_pixel_far_from_all_others_does_not_spoil_the_statistics() -> None:
    norm = norm_of(16)
    fused = copy.deepcopy(norm)
    normalization._fuse(fused, relu=True)
    features = drawn((4, 16, 48, 48))
    features[0, :, 0, 0] += 100
    fused(features)
    expected = norm.double()
    expected(features.double())
    torch.testing.assert_close(fused.running_var.double(), expected.running_var, rtol=1e-3, atol=0)  # type: ignore[union-attr]


def test_what_is_not_a_number_is_passed_on() -> None:
    fused = norm_of(6)
    normalization._fuse(fused, relu=True)
    features = drawn((2, 6, 3, 4))
    features[1, 2, 0, 0] = torch.nan
    found = fused(features)
    assert found[:, 2].isnan().all()
    assert found[:, [0, 1, 3, 4, 5]].isfinite().all()


def test_in_evaluation_it_is_the_plain_module() -> None:
    norm = norm_of(6)
    fused = copy.deepcopy(norm).eval()
    normalization._fuse(fused, relu=True)
    features, added = torch.randn(2, 2, 6, 3, 4, device=DEVICE)
    before = fused.running_mean.clone()  # type: ignore[union-attr]
    assert torch.equal(fused(features, added), (norm.eval()(features) + added).relu())
    assert torch.equal(fused.running_mean, before)  # type: ignore[arg-type]


def test_maps_that_are_not_channels_last_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = norm_of(6)
    fused = copy.deepcopy(norm)
    normalization._fuse(fused, relu=True)
    monkeypatch.setattr(normalization, "_Normalize", None)
    features = torch.randn(2, 6, 3, 4, device=DEVICE)
    assert torch.equal(fused(features), norm(features).relu())


def test_one_pixel_is_refused_as_torch_does() -> None:
    fused = norm_of(6)
    normalization._fuse(fused, relu=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fused(torch.randn(1, 6, 1, 1, device=DEVICE))


@pytest.mark.parametrize(
    ("head", "backbone"), [("caa", "test_resnet"), ("fcn", "resnet18"), ("danet", "test_efficientnet")]
)
def test_a_model_learns_the_same(head: str, backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Convolutions that round their inputs to 10 bits would make much of differences in the last of 24.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = caaseg.create_model(head, backbone=backbone, aux=True, **SMALL).train()  # type: ignore[arg-type]
    model = model.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    fused = copy.deepcopy(model)
    fuse_batch_norm(fused)
    assert not [module for module in fused.modules() if type(module) is nn.BatchNorm2d]  # none was left out
    assert not {"BasicBlock", "Bottleneck"} & {type(module).__name__ for module in fused.modules()}
    assert any(isinstance(module, FusedBatchNorm) for module in fused.modules())
    applied: list[FusedBatchNorm] = []
    apply: Any = normalization._Normalize.apply

    def watched(*given: Any) -> Any:
        applied.append(given[-1])
        return apply(*given)

    monkeypatch.setattr(normalization._Normalize, "apply", watched)
    images, found = drawn((2, 3, 40, 51)), []
    for network in (model, fused):
        logits = network(images).logits
        logits.square().mean().backward()
        found.append([logits, *(parameter.grad for parameter in network.parameters() if parameter.grad is not None)])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= 1e-3 * expected.norm() + 1e-6
    assert len(applied) == sum(
        isinstance(module, FusedBatchNorm) for module in fused.modules()
    )  # every one ran the kernels
    states = model.state_dict(), fused.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-4)


def test_it_is_the_same_bit_for_bit() -> None:
    fused = norm_of(20)
    normalization._fuse(fused, relu=True)
    given, cotangent = [drawn((3, 20, 9, 8))], drawn((3, 20, 9, 8))
    first = run(fused, given, cotangent, True)
    for _ in range(2 if launching.INTERPRETED else 50):
        assert all(torch.equal(a, b) for a, b in zip(first, run(fused, given, cotangent, True), strict=True))
