"""CUDA graphs: replays give the outputs of the model, and outputs of one call are not changed by the next."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Event, Thread

import pytest
import torch
from torch import nn

import caaseg
from caaseg.models import HEADS
from caaseg.models.cuda_graphs import MAX_SIZES, CapturedModel, capture_coarse
from caaseg.models.folding import fold_batch_norm
from caaseg.models.segmenter import Prediction, resize_prediction

SMALL = {"backbone": "test_resnet", "num_classes": 4, "channels": 12, "key_channels": 4, "gate_width": 8}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


def test_on_a_cpu_a_captured_model_calls_the_model() -> None:
    model = caaseg.create_model("danet", **SMALL).eval()  # type: ignore[arg-type]
    images = torch.randn(2, 3, 33, 41)
    with torch.inference_mode():
        expected, found = model(images), CapturedModel(model)(images)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_resizing_to_the_same_size_returns_a_copy() -> None:
    coarse = Prediction(torch.randn(1, 4, 5, 6), torch.randn(1, 4, 5, 6), {"channel": torch.randn(1, 4, 5, 6)})
    resized = resize_prediction(coarse, (5, 6))
    expected = [tensor.clone() for tensor in (coarse.logits, coarse.branches["channel"])]
    for tensor in (coarse.logits, coarse.aux, coarse.branches["channel"]):
        assert tensor is not None
        tensor.zero_()  # as the next replay would overwrite it
    torch.testing.assert_close([resized.logits, resized.branches["channel"]], expected)
    assert resized.aux is not None
    assert resized.aux.abs().sum() > 0


@needs_gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_replays_give_the_outputs_of_the_model(autocast: bool) -> None:
    model = caaseg.create_model("danet", aux=True, **SMALL).cuda().eval()  # type: ignore[arg-type]
    replayed = CapturedModel(model)
    sizes = [(2, 3, 33, 41), (1, 3, 64, 48)]
    outputs = []
    with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        for _ in range(4):
            for size in sizes:
                images = torch.randn(size, device="cuda").contiguous(memory_format=torch.channels_last)
                outputs.append((replayed(images), model(images)))
    torch.testing.assert_close([found for found, _ in outputs], [expected for _, expected in outputs])
    assert len(replayed._captures) == len(sizes)
    assert all(replayed._captures.values())


@needs_gpu
def test_cast_weights_are_not_freed_while_a_graph_uses_them() -> None:
    """Autocast caches cast weights and frees them when its context ends: a captured graph must not use this cache."""
    model = fold_batch_norm(caaseg.create_model("caa", decoder=True, **SMALL).cuda())  # type: ignore[arg-type]
    replayed = CapturedModel(model)
    for _ in range(5):
        images = torch.randn(1, 3, 40, 51, device="cuda")
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            found = replayed(images).logits
        filler = torch.full((1 << 20,), torch.nan, device="cuda", dtype=torch.bfloat16)  # overwrites freed memory
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16):
            torch.testing.assert_close(found, model(images).logits)
        del filler


@needs_gpu
def test_image_sizes_beyond_the_maximum_number_run_without_a_graph() -> None:
    model = caaseg.create_model("fcn", **SMALL).cuda().eval()  # type: ignore[arg-type]
    replayed = CapturedModel(model)
    with torch.inference_mode():
        for _ in range(3):
            for width in range(32, 32 + MAX_SIZES + 4):
                images = torch.randn(1, 3, 32, width, device="cuda")
                torch.testing.assert_close(replayed(images), model(images))
    assert len(replayed._captures) == MAX_SIZES


@needs_gpu
def test_calls_with_gradients_are_not_captured() -> None:
    model = caaseg.create_model("fcn", **SMALL).cuda().eval()  # type: ignore[arg-type]
    images = torch.randn(1, 3, 32, 32, device="cuda")
    replayed = CapturedModel(model)
    for _ in range(3):
        replayed(images).logits.sum().backward()
    assert model.classifier.weight.grad is not None
    assert not replayed._captures


@needs_gpu
@pytest.mark.parametrize("head", HEADS)
@torch.backends.cudnn.flags(enabled=False)  # in a graph, cuDNN may choose other algorithms, with other rounding
def test_a_captured_training_step_gives_outputs_gradients_and_buffers_of_the_model(head: str) -> None:
    model = caaseg.create_model(head, aux=True, **SMALL).cuda().train()  # type: ignore[arg-type]
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    captured, images = copy.deepcopy(model), torch.randn(2, 3, 65, 65, device="cuda")
    replay = capture_coarse(captured, images, nullcontext)
    for name, buffer in captured.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name)), name
    for _ in range(2):
        images = torch.randn(2, 3, 65, 65, device="cuda")
        found, expected = replay(images), model.coarse(images)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        for part, prediction in ((captured, found), (model, expected)):
            part.zero_grad()  # gradients of a replay are overwritten by the next one
            outputs = [prediction.logits, prediction.aux, prediction.presence, *prediction.branches.values()]
            torch.stack([output.square().mean() for output in outputs if output is not None]).sum().backward()  # type: ignore[no-untyped-call]
        gradients = [[p.grad for p in part.parameters() if p.grad is not None] for part in (captured, model)]
        torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-2, atol=1e-3)
    for name, buffer in captured.named_buffers():  # such as batch norm statistics and the bases of emanet
        torch.testing.assert_close(buffer, model.get_buffer(name), rtol=1e-3, atol=1e-4)


@contextmanager
def pinning() -> Iterator[None]:
    """Pin new memory in another thread all the time, as data loaders do when they start."""
    stopped, started = Event(), Event()
    failed: list[BaseException] = []

    def pin() -> None:
        pinned = []
        try:
            for _ in range(1_000_000):
                pinned.append(torch.zeros(4096, dtype=torch.uint8).pin_memory())
                started.set()
                if stopped.is_set():
                    return
            raise RuntimeError("pinned all memory before the test ended")
        except BaseException as error:
            failed.append(error)
            started.set()

    thread = Thread(target=pin)
    thread.start()
    started.wait()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
    assert not failed


@needs_gpu
def test_another_thread_may_pin_memory_during_capture() -> None:
    model = caaseg.create_model("caa", **SMALL).cuda()  # type: ignore[arg-type]
    images = torch.randn(2, 3, 65, 65, device="cuda").contiguous(memory_format=torch.channels_last)
    with pinning():
        for _ in range(5):
            replayed = CapturedModel(model.eval())
            with torch.inference_mode():
                expected = model(images).logits
                for _ in range(3):
                    found = replayed(images).logits
            assert all(replayed._captures.values())
            torch.testing.assert_close(found, expected)
            step = capture_coarse(model.train(), images, nullcontext)
            step(images).logits.sum().backward()  # type: ignore[no-untyped-call]
    assert all(parameter.grad is not None for parameter in model.parameters())
