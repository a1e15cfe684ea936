"""Models prepared for inference give the same outputs; failed allocations are recognized."""

from pathlib import Path

import pytest
import torch
from torch import nn

import caaseg
from caaseg.models.cuda_graphs import CapturedModel
from caaseg.models.inference import is_out_of_memory, load_for_inference, prepare_for_inference
from tests.small_models import small_model, with_statistics


def test_a_prepared_model_gives_the_same_outputs_and_the_original_is_unchanged() -> None:
    model, images = with_statistics(small_model(decoder=True)), torch.randn(2, 3, 40, 51)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepared = prepare_for_inference(model, device="cpu")
    with torch.inference_mode():
        torch.testing.assert_close(prepared(images).logits, model(images).logits, atol=1e-5, rtol=1e-4)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in prepared.modules())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    fine = prepare_for_inference(model, device="cpu", output_stride=8)
    assert isinstance(fine, caaseg.Segmenter)
    assert fine.config.output_stride == 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_prepared_model_on_a_gpu_is_captured_unless_capture_is_false() -> None:
    model = with_statistics(small_model())
    assert isinstance(prepare_for_inference(model, device="cuda"), CapturedModel)
    assert not isinstance(prepare_for_inference(model, device="cuda", capture=False), CapturedModel)


def test_the_digest_differs_between_models_and_between_output_strides(tmp_path: Path) -> None:
    model = with_statistics(small_model())
    model.save_pretrained(tmp_path / "one")
    with torch.no_grad():
        model.classifier.weight[0, 0] += 1e-3
    model.save_pretrained(tmp_path / "two")
    one = load_for_inference(str(tmp_path / "one"))
    assert (one.num_classes, one.classes, len(one.palette)) == (5, None, 5)
    others = [load_for_inference(str(tmp_path / "two")), load_for_inference(str(tmp_path / "one"), output_stride=8)]
    assert load_for_inference(str(tmp_path / "one")).digest == one.digest
    assert one.digest not in [other.digest for other in others]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (MemoryError(), True),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4 bytes"), True),
        (RuntimeError("value cannot be converted to type int without overflow"), False),
        (RuntimeError("Overflow when unpacking long"), False),
        (ValueError("not enough memory"), False),
    ],
)
def test_only_failed_allocations_are_out_of_memory(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) == expected


def test_an_allocation_that_fails_on_the_cpu_is_out_of_memory() -> None:
    for size in (2**55, 2**62):  # more memory than any machine has, and more bytes than fit into 64 bits
        with pytest.raises(RuntimeError) as caught:
            torch.empty(size, dtype=torch.float64)
        assert is_out_of_memory(caught.value), caught.value
