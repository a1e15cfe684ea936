"""The Triton kernel of `upsampled`."""

import triton.language as tl

from caaseg.kernels.launching import Kernel, jit


@jit
def _features(
    pixels: tl.tensor, start: tl.tensor, at: tl.tensor, w: tl.tensor, classes: tl.tensor, block_k: tl.constexpr
) -> tl.tensor:
    """Some features of a coarse line by all classes."""
    k = tl.arange(0, block_k)
    inside = (at < w)[:, None] & (k < classes)[None, :]
    return tl.load(pixels + start + at[:, None] * classes + k[None, :], inside, other=0.0).to(tl.float32)


@jit
def _first_pixel(feature: tl.tensor, step_x: tl.tensor, width: tl.tensor) -> tl.tensor:
    """The first pixel of a line that lies on a feature or right of it; of feature 0, all do."""
    return tl.minimum(tl.ceil(feature / tl.maximum(step_x, 1e-30)), width).to(tl.int32)


@Kernel
def cross_entropy_kernel(
    pixels: tl.tensor,  # (N, h, w, K) coarse logits
    labels: tl.tensor,  # (N, H, W)
    weights: tl.tensor,  # (K,) where weighted
    losses: tl.tensor,  # (N, H, blocks) float32: a part each program
    lines: tl.tensor,  # (N, H, blocks, block_w, K) float32: gradients of each program's features
    height: tl.tensor,
    width: tl.tensor,
    h: tl.tensor,
    w: tl.tensor,
    classes: tl.tensor,
    step_y: tl.tensor,
    step_x: tl.tensor,
    ignore: tl.constexpr,
    weighted: tl.constexpr,
    exact: tl.constexpr,
    block_w: tl.constexpr,
    block_x: tl.constexpr,
    block_k: tl.constexpr,
) -> None:
    """The pixels of a line between some features: their losses, and what they add to the features' gradients.

    Interpolation and its gradient are products with the features' shares in the pixels: so the logits of a pixel lie
    in few threads, and a program reads no feature twice. The last feature of a program is the first of the next.
    """
    line, block = tl.program_id(0), tl.program_id(1)
    image, y = line // height, line % height
    first = block * (block_w - 1)
    k = tl.arange(0, block_k)
    features = first + tl.arange(0, block_w)

    # Between the line above and the line below.
    at_y = y * step_y
    above = tl.minimum(tl.floor(at_y).to(tl.int32), h - 1)
    below = tl.minimum(above + 1, h - 1)
    down = at_y - above
    upper = _features(pixels, (image.to(tl.int64) * h + above) * w * classes, features, w, classes, block_k)
    lower = _features(pixels, (image.to(tl.int64) * h + below) * w * classes, features, w, classes, block_k)
    between = upper * (1 - down) + lower * down

    begin, end = _first_pixel(first, step_x, width), _first_pixel(first + block_w - 1, step_x, width)
    if block == tl.num_programs(1) - 1:
        end = width
    grad = tl.zeros([block_w, block_k], tl.float32)
    total = tl.zeros([block_x], tl.float32)
    for x in range(begin, end, block_x):
        at = x + tl.arange(0, block_x)
        at_x = at * step_x
        share = tl.maximum(1 - tl.abs(at_x[:, None] - features[None, :]), 0.0)
        logits = tl.dot(share, between, input_precision="ieee" if exact else "tf32x3")
        logits = tl.where((k < classes)[None, :], logits, float("-inf"))

        label = tl.load(labels + line.to(tl.int64) * width + at, at < end, other=ignore).to(tl.int32)
        counts = tl.where(label != ignore, 1.0, 0.0)
        if weighted:
            counts *= tl.load(weights + label, label < classes, other=0.0)
        highest = tl.max(logits, 1)
        powers = tl.exp(logits - highest[:, None])
        summed = tl.sum(powers, 1)
        # Of many classes, the ignored label is the number of a column too.
        is_label = (label[:, None] == k[None, :]) & (label != ignore)[:, None]
        of_label = tl.sum(tl.where(is_label, logits, 0.0), 1)
        total += (highest + tl.log(summed) - of_label) * counts

        of_pixels = powers * (counts / summed)[:, None] - tl.where(is_label, counts[:, None], 0.0)
        turned = tl.maximum(1 - tl.abs(at_x[None, :] - features[:, None]), 0.0)
        grad += tl.dot(turned, of_pixels, input_precision="ieee" if exact else "tf32")
    part = line.to(tl.int64) * tl.num_programs(1) + block
    where = lines + (part * block_w + tl.arange(0, block_w)[:, None]) * classes + k[None, :]
    tl.store(where, grad, (k < classes)[None, :])
    tl.store(losses + part, tl.sum(total, 0))
