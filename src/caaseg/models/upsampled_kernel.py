"""The Triton kernel of `upsampled`."""

import triton.language as tl

from caaseg.attention.launching import Kernel, jit


@jit
def _features(
    pixels: tl.tensor, start: tl.tensor, at: tl.tensor, w: tl.tensor, classes: tl.tensor, block_k: tl.constexpr
) -> tl.tensor:
    """Some features of a coarse line by all classes."""
    k = tl.arange(0, block_k)
    inside = ((at >= 0) & (at < w))[:, None] & (k < classes)[None, :]
    return tl.load(pixels + start + at[:, None] * classes + k[None, :], inside, other=0.0).to(tl.float32)


@Kernel
def cross_entropy_kernel(
    pixels: tl.tensor,  # (N, h, w, K) coarse logits
    labels: tl.tensor,  # (N, H, W)
    weights: tl.tensor,  # (K,) where weighted
    losses: tl.tensor,  # (N, H, blocks) float32: a part each program
    lines: tl.tensor,  # (N, H, w, K) float32: gradients summed over the pixels of a line
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
    """One line of pixels: the losses of those right of some features, and the gradients of these features."""
    line, block = tl.program_id(0), tl.program_id(1)
    image, y = line // height, line % height
    first = block * block_w
    k = tl.arange(0, block_k)
    features = first + tl.arange(0, block_w)

    # Above and below.
    at_y = y * step_y
    above = tl.minimum(tl.floor(at_y).to(tl.int32), h - 1)
    below = tl.minimum(above + 1, h - 1)
    down = at_y - above
    upper = (image.to(tl.int64) * h + above) * w * classes
    lower = (image.to(tl.int64) * h + below) * w * classes

    # Pixels that see one of the features: from the one left of the first to the one right of the last.
    if step_x > 0:
        begin = tl.maximum(tl.floor((first - 1) / step_x).to(tl.int32), 0)
        end = tl.minimum(tl.ceil((first + block_w) / step_x).to(tl.int32) + 1, width)
    else:
        begin, end = 0, width

    grad = tl.zeros([block_w, block_k], tl.float32)
    total = tl.zeros([block_x], tl.float32)
    for x in range(begin, end, block_x):
        at = x + tl.arange(0, block_x)
        at_x = at * step_x
        left = tl.minimum(tl.floor(at_x).to(tl.int32), w - 1)
        right = tl.minimum(left + 1, w - 1)
        over = (at_x - left)[:, None]
        top = _features(pixels, upper, left, w, classes, block_k) * (1 - over)
        top += _features(pixels, upper, right, w, classes, block_k) * over
        bottom = _features(pixels, lower, left, w, classes, block_k) * (1 - over)
        bottom += _features(pixels, lower, right, w, classes, block_k) * over
        logits = tl.where((k < classes)[None, :], top * (1 - down) + bottom * down, float("-inf"))

        label = tl.load(labels + line.to(tl.int64) * width + at, at < end, other=ignore).to(tl.int32)
        counts = tl.where((at < end) & (label != ignore), 1.0, 0.0)
        if weighted:
            counts *= tl.load(weights + label, label < classes, other=0.0)
        highest = tl.max(logits, 1)
        powers = tl.exp(logits - highest[:, None])
        summed = tl.sum(powers, 1)
        # Of many classes, the ignored label is the number of a column too.
        is_label = (label[:, None] == k[None, :]) & (label != ignore)[:, None]
        of_label = tl.sum(tl.where(is_label, logits, 0.0), 1)
        loss = (highest + tl.log(summed) - of_label) * counts
        total += tl.where((left >= first) & (left < first + block_w), loss, 0.0)  # each pixel in one program

        of_pixels = (powers / summed[:, None] - tl.where(is_label, 1.0, 0.0)) * counts[:, None]
        share = tl.where(left[None, :] == features[:, None], 1 - tl.trans(over), 0.0)
        share += tl.where(right[None, :] == features[:, None], tl.trans(over), 0.0)
        grad += tl.dot(share, of_pixels, input_precision="ieee" if exact else "tf32")
    where = lines + ((line.to(tl.int64) * w + features[:, None]) * classes + k[None, :])
    tl.store(where, grad, (features < w)[:, None] & (k < classes)[None, :])
    tl.store(losses + line.to(tl.int64) * tl.num_programs(1) + block, tl.sum(total, 0))
