"""Cross entropy of coarse logits against upsampled logits in float64. Without a GPU, in Triton's interpreter."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from caaseg.data.sample import IGNORE
from caaseg.kernels import is_supported
from caaseg.models.resize import resize

pytest.importorskip("triton", reason="triton is not installed")

from caaseg.kernels.cross_entropy import interpolation_matrix, upsampled_cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SIZES = [
    ((4, 5), (25, 33)),
    ((1, 1), (7, 5)),
    ((2, 20), (9, 153)),  # more features than one program takes
    ((6, 7), (6, 7)),
    ((9, 40), (5, 17)),  # finer than the labels
    ((3, 4), (9, 1)),
]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("coarse", "fine"), SIZES, ids=str)
def test_loss_and_gradient_equal_those_of_upsampled_logits(
    coarse: tuple[int, int], fine: tuple[int, int], weighted: bool
) -> None:
    compare(5, coarse, fine, weighted)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("classes", [5, 171])
def test_label_smoothing_equals_that_of_torch(classes: int, weighted: bool) -> None:
    compare(classes, (4, 5), (25, 33), weighted, label_smoothing=0.1)


@pytest.mark.parametrize("classes", [2, 16, 128, 129, 171, 255])
def test_up_to_255_classes_are_supported(classes: int) -> None:
    compare(classes, (2, 3), (5, 9), weighted=True)


def compare(
    classes: int, coarse: tuple[int, int], fine: tuple[int, int], weighted: bool, label_smoothing: float = 0.0
) -> None:
    logits = (3 * torch.randn(2, classes, *coarse, device=DEVICE)).requires_grad_()
    labels = torch.randint(classes, (2, *fine), dtype=torch.uint8, device=DEVICE)
    labels[torch.rand(labels.shape, device=DEVICE) < 0.3] = IGNORE
    weights = torch.rand(classes, device=DEVICE) + 0.1 if weighted else None
    assert is_supported(logits) == logits.is_cuda  # the interpreter is for tests only
    smoothing = label_smoothing
    loss = upsampled_cross_entropy(logits, labels, weights, ignore_index=IGNORE, label_smoothing=smoothing)
    (gradient,) = torch.autograd.grad(0.3 * loss, logits)

    reference = logits.detach().double().requires_grad_()
    rows = resize(reference, fine).movedim(1, -1).flatten(0, -2)
    factors = None if weights is None else weights.double()
    targets = labels.flatten().long()
    expected = cross_entropy(
        rows, targets, weight=factors, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
    )
    (expected_gradient,) = torch.autograd.grad(0.3 * expected, reference)
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-4, atol=1e-5)


def test_loss_and_gradient_are_zero_if_all_labels_are_ignored() -> None:
    logits = torch.randn(1, 3, 2, 2, device=DEVICE, requires_grad=True)
    labels = torch.full((1, 9, 9), IGNORE, dtype=torch.uint8, device=DEVICE)
    loss = upsampled_cross_entropy(logits, labels, None, ignore_index=IGNORE)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss == 0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_the_interpolation_matrix_equals_resize() -> None:
    for coarse, fine in ((1, 4), (5, 33), (5, 1), (7, 4), (6, 6)):
        line = torch.randn(coarse)
        expected = resize(line.view(1, 1, 1, coarse), (1, fine)).flatten()
        torch.testing.assert_close(interpolation_matrix(coarse, fine, line.device) @ line, expected)
