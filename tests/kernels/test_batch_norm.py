"""Fused batch normalization, addition and ReLU against torch's modules. Without a GPU, in Triton's interpreter."""

import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import caaseg

pytest.importorskip("triton", reason="triton is not installed")

from caaseg.kernels import batch_norm as kernels
from caaseg.kernels.common import INTERPRETED
from caaseg.models.fused_norm import FusedBatchNorm, FusedSyncBatchNorm, convert_batch_norm, fuse_batch_norm
from tests.processes import run_ranks

pytestmark = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()),
    reason="no GPU, and triton was imported before TRITON_INTERPRET=1 was set",
)

DEVICE = "cpu" if INTERPRETED else "cuda"
SMALL = {"num_classes": 4, "channels": 12, "key_channels": 4, "gate_width": 8}


def random_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels, eps=1e-3, momentum=0.3)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    nn.init.normal_(norm.bias)
    assert norm.running_mean is not None
    nn.init.normal_(norm.running_mean)
    return norm.to(DEVICE)


def draw(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, scale: float = 1, mean: float = 0) -> Tensor:
    return (torch.randn(shape) * scale + mean).to(DEVICE, dtype).contiguous(memory_format=torch.channels_last)


def run(norm: nn.Module, inputs: list[Tensor], cotangent: Tensor, relu: bool) -> list[Tensor]:
    """Return the result and the gradients of the inputs and parameters of a plain or fused module."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    if isinstance(norm, FusedBatchNorm | FusedSyncBatchNorm):
        result = norm(*inputs)
    else:
        result = norm(inputs[0]) + (inputs[1] if len(inputs) > 1 else 0)
        result = result.relu() if relu else result
    return [result, *torch.autograd.grad(result, [*inputs, *norm.parameters()], cotangent)]


@pytest.mark.parametrize(
    ("shape", "dtype", "with_residual", "relu"),
    [
        ((2, 20, 5, 7), torch.float32, True, True),
        ((2, 20, 5, 7), torch.float32, True, False),
        ((2, 20, 5, 7), torch.float32, False, True),
        ((2, 20, 5, 7), torch.float32, False, False),
        ((1, 130, 3, 3), torch.float32, True, True),
        ((2, 16, 17, 20), torch.bfloat16, True, True),
        pytest.param((3, 16, 33, 40), torch.bfloat16, True, False, marks=pytest.mark.slow),
        pytest.param((3, 16, 33, 40), torch.bfloat16, False, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_result_gradients_and_statistics_equal_those_of_float64(
    shape: tuple[int, int, int, int], dtype: torch.dtype, with_residual: bool, relu: bool
) -> None:
    norm = random_norm(shape[1])
    reference, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    convert_batch_norm(fused, relu=relu)
    # A mean far from zero, where a difference of sums of squares would cancel.
    inputs = [draw(shape, dtype, 2, 30), draw(shape, dtype)][: 1 + with_residual]
    cotangent = draw(shape, dtype)
    found = run(fused, inputs, cotangent, relu)
    plain = run(copy.deepcopy(norm), inputs, cotangent, relu)
    expected = run(reference, [tensor.double() for tensor in inputs], cotangent.double(), relu)
    for ours, torchs, exact in zip(found, plain, expected, strict=True):
        our_error, torch_error = ((tensor.double() - exact).norm() / exact.norm() for tensor in (ours, torchs))
        assert our_error < max(2 * torch_error, 1e-5 if dtype == torch.float32 else 2e-2)
        assert ours.dtype == torchs.dtype
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        torch.testing.assert_close(
            getattr(fused, name).double(), getattr(reference, name).double(), rtol=1e-5, atol=1e-5
        )


class Additions(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts additions of tensors by torch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("relu", [True, False])
def test_gradients_of_a_duplicated_result_are_summed(relu: bool) -> None:
    norm = random_norm(20)
    reference, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    convert_batch_norm(fused, relu=relu)
    inputs = [draw((2, 20, 5, 7)).requires_grad_() for _ in range(2)]
    cotangents = [draw((2, 20, 5, 7)) for _ in range(2)]
    results = fused(*inputs, duplicate=True)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    with Additions() as additions:
        found = torch.autograd.grad(results, [*inputs, *fused.parameters()], cotangents)
    assert additions.number == (0 if relu else 1)  # with ReLU, the kernel adds them
    exact = [tensor.detach().double() for tensor in inputs]
    expected = run(reference, exact, sum(cotangents[1:], cotangents[0]).double(), relu)
    for ours, theirs in zip([results[0], *found], expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradients_between_the_blocks_of_a_stage_are_summed_in_the_kernel() -> None:
    """Both gradients of a duplicated result reach the kernels: torch adds none of them before."""
    model = caaseg.create_model("fcn", backbone="resnet18", **SMALL).to(memory_format=torch.channels_last)  # type: ignore[arg-type, call-overload]
    fuse_batch_norm(model.to(DEVICE))
    readers = Counter(edges(model(draw((2, 3, 17, 24))).logits.grad_fn))
    duplicated = [node for node, output in readers if output == 1]
    assert len(duplicated) == 4  # one per stage of two blocks
    assert [readers[node, output] for node in duplicated for output in (0, 1)] == [1] * 8


def edges(root: Any) -> Iterator[tuple[Any, int]]:
    """Yield each edge of an autograd graph: the node that receives a gradient, and for which of its outputs."""
    found, pending = {root}, [root]
    while pending:
        for node, output in pending.pop().next_functions:
            if node is not None:
                yield node, output
            if node is not None and node not in found:
                found.add(node)
                pending.append(node)


@pytest.mark.slow
def test_many_partial_sums_are_merged_in_several_iterations() -> None:
    inputs, cotangent = [draw((1, 3, 257, 257), scale=2, mean=3)], draw((1, 3, 257, 257))
    assert kernels.Layout(inputs[0]).sums_grid[0] > 256
    norm = random_norm(3)
    reference, fused = copy.deepcopy(norm).double(), copy.deepcopy(norm)
    convert_batch_norm(fused, relu=True)
    found = run(fused, inputs, cotangent, True)
    expected = run(reference, [inputs[0].double()], cotangent.double(), True)
    torch.testing.assert_close([tensor.double() for tensor in found], expected, rtol=1e-4, atol=1e-4)


def test_statistics_are_exact_if_the_first_pixel_is_an_outlier() -> None:
    norm = random_norm(16)
    fused = copy.deepcopy(norm)
    convert_batch_norm(fused, relu=True)
    features = draw((4, 16, 48, 48))
    features[0, :, 0, 0] += 100
    fused(features)
    expected = norm.double()
    expected(features.double())
    torch.testing.assert_close(fused.running_var.double(), expected.running_var, rtol=1e-3, atol=0)  # type: ignore[union-attr]


def test_nan_propagates() -> None:
    fused = random_norm(6)
    convert_batch_norm(fused, relu=True)
    features = draw((2, 6, 3, 4))
    features[1, 2, 0, 0] = torch.nan
    found = fused(features)
    assert found[:, 2].isnan().all()
    assert found[:, [0, 1, 3, 4, 5]].isfinite().all()


def test_evaluation_equals_the_plain_module() -> None:
    norm = random_norm(6)
    fused = copy.deepcopy(norm).eval()
    convert_batch_norm(fused, relu=True)
    features, added = torch.randn(2, 2, 6, 3, 4, device=DEVICE)
    before = fused.running_mean.clone()  # type: ignore[union-attr]
    assert torch.equal(fused(features, added), (norm.eval()(features) + added).relu())
    assert torch.equal(fused.running_mean, before)  # type: ignore[arg-type]


def test_maps_that_are_not_channels_last_are_normalized_by_torch() -> None:
    norm = random_norm(6)
    fused = copy.deepcopy(norm)
    convert_batch_norm(fused, relu=True)
    features = torch.randn(2, 6, 3, 4, device=DEVICE)
    found = fused(features)
    assert torch.equal(found, norm(features).relu())
    assert "Relu" in str(found.grad_fn)  # torch's own operator


def test_a_single_pixel_raises_the_error_of_torch() -> None:
    fused = random_norm(6)
    convert_batch_norm(fused, relu=True)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        fused(torch.randn(1, 6, 1, 1, device=DEVICE))


def autograd_node(output: Tensor | tuple[Tensor, ...]) -> str:
    return type((output if isinstance(output, Tensor) else output[0]).grad_fn).__name__


@pytest.mark.parametrize(
    ("head", "backbone"),
    [
        ("caa", "test_resnet"),
        pytest.param("danet", "test_efficientnet", marks=pytest.mark.slow),
        pytest.param("psp", "test_resnet", marks=pytest.mark.slow),
        pytest.param("upernet", "test_resnet", marks=pytest.mark.slow),
    ],
)
def test_a_fused_model_has_the_same_outputs_gradients_and_statistics(
    head: str, backbone: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # TF32 convolutions would amplify differences in the last bit.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.manual_seed(0)
    model = caaseg.create_model(head, backbone=backbone, aux=True, **SMALL).train()  # type: ignore[arg-type]
    model = model.to(DEVICE, memory_format=torch.channels_last)  # type: ignore[call-overload]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    fused = copy.deepcopy(model)
    fuse_batch_norm(fused)
    assert not [module for module in fused.modules() if type(module) is nn.BatchNorm2d]
    assert not {"BasicBlock", "Bottleneck"} & {type(module).__name__ for module in fused.modules()}
    assert any(isinstance(module, FusedBatchNorm) for module in fused.modules())
    nodes: list[str] = []  # of the outputs of all fused modules in the autograd graph
    for module in fused.modules():
        if isinstance(module, FusedBatchNorm):
            module.register_forward_hook(lambda module, inputs, output: nodes.append(autograd_node(output)))
    images, found = draw((2, 3, 33, 41)), []
    for network in (model, fused):
        logits = network(images).logits
        logits.square().mean().backward()
        found.append([logits, *(parameter.grad for parameter in network.parameters() if parameter.grad is not None)])
    for expected, ours in zip(*found, strict=True):
        assert (ours - expected).norm() <= 1e-3 * expected.norm() + 1e-6
    assert len(nodes) == sum(isinstance(module, FusedBatchNorm) for module in fused.modules())
    assert set(nodes) == {"_BatchNormBackward"}  # all used the kernels
    states = model.state_dict(), fused.state_dict()
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-3, atol=1e-4)


def normalize_part(directory: Path) -> None:
    """Normalize this rank's half of a batch, synchronized with the other rank."""
    dist.init_process_group("gloo")
    norm, inputs, cotangent = torch.load(directory / "problem.pt", weights_only=False)
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(norm)  # type: ignore[no-untyped-call]
    convert_batch_norm(synchronized, relu=True)
    parts = [tensor.chunk(2)[dist.get_rank()] for tensor in (*inputs, cotangent)]
    found = run(synchronized, parts[:-1], parts[-1], True)
    torch.save([*found, *synchronized.buffers()], directory / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


@pytest.mark.skipif(not INTERPRETED, reason="the processes use gloo on a CPU, where kernels need the interpreter")
def test_two_processes_normalize_like_one_with_the_whole_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = (4, 20, 5, 7)
    norm, inputs, cotangent = random_norm(20), [draw(shape, scale=2, mean=30), draw(shape)], draw(shape)
    inputs[0][:2] += 3  # the halves have different means
    torch.save((norm, inputs, cotangent), tmp_path / "problem.pt")
    assert run_ranks(normalize_part, tmp_path) == [0, 0]
    norm = norm.double()
    expected = run(norm, [tensor.double() for tensor in inputs], cotangent.double(), True)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    whole = [torch.cat(pair) for pair in zip(first[:3], second[:3], strict=True)]  # output, gradients of both inputs
    whole += [a + b for a, b in zip(first[3:5], second[3:5], strict=True)]  # gradients of weight and bias
    for ours, exact in zip(whole, expected, strict=True):
        assert (ours.double() - exact).norm() < 1e-5 * exact.norm()
    for buffers in (first[5:], second[5:]):
        for ours, exact in zip(buffers, norm.buffers(), strict=True):
            torch.testing.assert_close(ours.double(), exact.double(), rtol=1e-5, atol=1e-5)


def test_results_are_bitwise_deterministic() -> None:
    fused = random_norm(20)
    convert_batch_norm(fused, relu=True)
    inputs, cotangent = [draw((3, 20, 9, 8))], draw((3, 20, 9, 8))
    first = run(fused, inputs, cotangent, True)
    for _ in range(2 if INTERPRETED else 50):
        assert all(torch.equal(a, b) for a, b in zip(first, run(fused, inputs, cotangent, True), strict=True))
