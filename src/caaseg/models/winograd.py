"""Winograd's algorithm for 3 x 3 convolutions with many channels, in exported models: the same outputs up to rounding.

F(4 x 4, 3 x 3) computes tiles of 4 x 4 outputs from tiles of 6 x 6 inputs with 36 multiplications per pair of channels
instead of 144 (Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016). onnxruntime computes
float32 convolutions directly, so that fewer multiplications save time. Rounding errors of a layer are about ten times
as large as those of a direct convolution.

Shapes: N batch, C input channels, K output channels, H rows, W columns, P tiles along an axis.
"""

import torch
from torch import Tensor, nn

from caaseg.errors import CaasegError
from caaseg.models.folding import Geometry, ReLUConvolution, fold_batch_norm
from caaseg.models.segmenter import Segmenter

MIN_WEIGHTS = 9 * 512 * 512
"""Minimum number of weights of a convolution: with fewer, the transforms take as long as the algorithm saves."""
TILE = 4  # outputs per tile and axis
INPUTS = 6  # inputs per tile and axis: 4 outputs and a border of 1

# Matrices of F(4, 3) along one axis, at the points 0, 1, -1, 2, -2 and infinity.
_INPUT = torch.tensor(
    [
        [4, 0, -5, 0, 1, 0],
        [0, -4, -4, 1, 1, 0],
        [0, 4, -4, -1, 1, 0],
        [0, -2, -1, 2, 1, 0],
        [0, 2, -1, -2, 1, 0],
        [0, 4, 0, -5, 0, 1],
    ]
)
_WEIGHT = torch.tensor([[6, 0, 0], [-4, -4, -4], [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24]])  # times 24
_OUTPUT = torch.tensor([[1, 1, 1, 1, 1, 0], [0, 1, -1, 2, -2, 0], [0, 1, 1, 4, 4, 0], [0, 1, -1, 8, -8, 1]])


def use_winograd(model: Segmenter) -> tuple[Segmenter, int]:
    """Return a copy for inference whose large 3 x 3 convolutions use Winograd's algorithm, and their largest dilation.

    CaasegError if the model has no such convolution.
    """
    model = fold_batch_norm(model)
    dilations = []
    for name, module in list(model.named_modules()):
        if (replacement := _as_winograd(module)) is not None:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, replacement)
            dilations.append(replacement.dilation)
    if not dilations:
        raise CaasegError(
            "the model has no 3 x 3 convolution of 512 x 512 channels or more, which Winograd's algorithm computes "
            "faster; leave --winograd out"
        )
    return model, max(dilations)


def _as_winograd(module: nn.Module) -> "WinogradConvolution | None":
    """Return the replacement of a convolution; None if the algorithm does not apply to it, or would not be faster."""
    if isinstance(module, ReLUConvolution):
        geometry = module.geometry
    elif type(module) is nn.Conv2d and not isinstance(module.padding, str) and module.padding_mode == "zeros":
        stride, padding, dilation = (list(sides) for sides in (module.stride, module.padding, module.dilation))
        geometry = Geometry(stride, padding, dilation, module.groups)
    else:
        return None
    stride, padding, dilation, groups = geometry
    weight = module.weight
    same_size = stride == [1, 1] and padding == dilation and dilation[0] == dilation[1]
    if weight.shape[2:] != (3, 3) or not same_size or groups != 1 or weight.numel() < MIN_WEIGHTS:
        return None
    return WinogradConvolution(weight, module.bias, dilation[0], relu=isinstance(module, ReLUConvolution))


class WinogradConvolution(nn.Module):
    """3 x 3 convolution that keeps the size, optional sum with another feature map, and optional ReLU.

    The transforms are products with matrices that depend on height and width. They are dense: a product takes less
    time than onnxruntime's operators that would cut out overlapping tiles. A dilated convolution is a plain one of the
    pixels at each offset modulo the dilation; the matrices select these pixels too, and leave out the padding.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, dilation: int, *, relu: bool) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), None if bias is None else nn.Parameter(bias)
        self.dilation = dilation
        self.relu = relu

    def forward(self, features: Tensor, added: Tensor | None = None) -> Tensor:
        """(N, C, H, W) -> (N, K, H, W)."""
        n, c, height, width = features.shape
        k = len(self.weight)
        row_inputs, row_outputs = tile_matrices(height, self.dilation, features)  # (6P, H) each
        column_inputs, column_outputs = tile_matrices(width, self.dilation, features)  # (6P, W) each
        rows, columns = row_inputs.shape[0] // INPUTS, column_inputs.shape[0] // INPUTS  # P along each axis

        pixels = features.permute(0, 2, 3, 1).reshape(n, height, width * c)
        pixels = (row_inputs @ pixels).reshape(-1, width, c)  # (N * 6P, W, C)
        tiles = (column_inputs @ pixels).reshape(n, INPUTS, rows, INPUTS, columns * c)
        tiles = tiles.permute(1, 3, 0, 2, 4).reshape(INPUTS * INPUTS, -1, c)  # (36, N * P * P, C)

        small = _WEIGHT.to(features) / 24
        weight = (small @ self.weight @ small.t()).permute(2, 3, 1, 0).reshape(INPUTS * INPUTS, c, k)
        products = (tiles @ weight).reshape(INPUTS, INPUTS, n, rows, columns * k)

        products = products.permute(2, 0, 3, 1, 4).reshape(n, INPUTS * rows, -1)
        result = (row_outputs.t() @ products).reshape(-1, INPUTS * columns, k)  # (N * H, 6P, K)
        result = (column_outputs.t() @ result).reshape(n, height, width, k)
        if self.bias is not None:
            result = result + self.bias
        result = result.permute(0, 3, 1, 2)
        if added is not None:
            result = result + added
        return result.relu() if self.relu else result


def tile_matrices(length: int, dilation: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return two matrices for an axis, (6P, length): from its pixels to its tiles, and transposed from tiles to pixels.

    The rows are ordered by the 6 values of a tile, then by offset modulo the dilation, then by tile.

    Args:
        length: number of pixels.
        dilation: distance of neighboring pixels of a tile.
        like: tensor with the dtype and device of the matrices.
    """
    position = torch.arange(length, device=like.device)
    tile = torch.arange((length + TILE * dilation - 1) // (TILE * dilation), device=like.device)
    within = position // dilation - TILE * tile[:, None]  # (P', length), 0 to 3 for the outputs of the tile
    offset = torch.arange(dilation, device=like.device)[:, None] == position % dilation  # (dilation, length)
    inputs = (within[..., None] + 1 == torch.arange(INPUTS, device=like.device)).to(like) @ _INPUT.to(like).t()
    outputs = (within[..., None] == torch.arange(TILE, device=like.device)).to(like) @ _OUTPUT.to(like)
    matrices = (entries.permute(2, 0, 1)[:, None] * offset[:, None].to(like) for entries in (inputs, outputs))
    to_tiles, to_pixels = (matrix.reshape(-1, length) for matrix in matrices)
    return to_tiles, to_pixels
