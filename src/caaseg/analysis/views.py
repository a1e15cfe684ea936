"""What the parts of a model say beside the whole: the branches of a dual attention, and CAA with its gates flattened.

DANet's two branches, and the channel branch of the sequential design, were trained to classify. CAA has no such
branches: its channel attention is a factor within the spatial one. What can be asked of it is what its gates change, so
its other views are the same network with gates flattened. A level gate has its mean over the image's positions, channel
by channel: it weighs channels as before, but no longer looks where it is. An even gate has its mean over channels too:
it weighs nothing. The network was not trained so.

Shapes: N batch, V views, K classes, H x W pixels; h x w positions and C channels of the attention.
"""

from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from caaseg.attention import ChannelizedAxialAttention, channelized_axial_attention
from caaseg.data.transforms import normalize
from caaseg.models.heads import HEADS, head_class
from caaseg.models.resize import resize
from caaseg.models.segmenter import Segmenter

Flatness = Literal["kept", "level", "even"]
FLATTENED: tuple[tuple[Flatness, Flatness], ...] = (
    ("level", "kept"),
    ("kept", "level"),
    ("level", "level"),
    ("even", "even"),
)
"""What happens to the column gate and to the row gate in the views of a head that flattens gates."""


class Views(nn.Module):
    """A model that gives the logits of all its views, one after the other, as if they were classes: (N, V * K, H, W).

    A Predictor takes it as it takes any model.
    """

    def __init__(self, model: Segmenter) -> None:
        super().__init__()
        check_studied(model)
        self.model = model
        self.backbone = model.backbone  # whose mean and deviation a Predictor normalizes with
        self.names = model.head.views

    def forward(self, images: Tensor) -> Tensor:
        coarse, fine = self.model.features(images)
        whole = self.model.classify(coarse, fine)
        views = [whole.branches[name] for name in self.names[:-1] if name in whole.branches]  # (N, K, h, w) each
        if self.model.head.flattens_gates:
            for column, row in FLATTENED:
                with _block(self.model).register_forward_hook(partial(_flatten, column=column, row=row)):
                    views.append(self.model.classify(coarse, fine).logits)
        at_one_size = [resize(view, images.shape[2:]) for view in (*views, whole.logits)]
        return torch.cat(at_one_size, dim=1)


def check_studied(model: Segmenter) -> None:
    """Raise an error for a head without a second attention to study."""
    if not model.head.views:
        studied = {name: head_class(name) for name in HEADS if head_class(name).views}
        branches = ", ".join(name for name, head in studied.items() if not head.flattens_gates)
        gates = ", ".join(name for name, head in studied.items() if head.flattens_gates)
        raise ValueError(
            f"the model's head is {model.config.head}, which has neither attention branches nor gates along its axes "
            f"to study; expected {branches} (branches) or {gates} (gates)"
        )


def flattened(block: ChannelizedAxialAttention, features: Tensor, *, column: Flatness, row: Flatness) -> Tensor:
    """The output of a CAA block with its gates flattened. A gate that is kept has the values it has in the block.

    Args:
        block: the block, which has gates.
        features: its input, (N, C', h, w).
        column: what becomes of the column gate, which has a vector an image row.
        row: what becomes of the row gate, which has a vector an image column.
    """
    maps = block.explain(features)
    assert maps.column_gate is not None
    assert maps.row_gate is not None
    g_col, g_row = _flat(maps.column_gate, column), _flat(maps.row_gate, row)
    keys_and_values = block.column_keys(features), block.row_keys(features), block.values(features)
    return channelized_axial_attention(*keys_and_values, lambda _: g_col, lambda _: g_row, implementation="factorised")


def _flat(gate: Tensor, how: Flatness) -> Tensor:
    """(N, L, C) -> (N, L, C)."""
    if how == "kept":
        return gate
    return gate.mean(1 if how == "level" else (1, 2), keepdim=True).expand_as(gate)


class Gates(NamedTuple):
    """The gates of a CAA model on one image."""

    column: Tensor  # (h, C), a vector an image row
    row: Tensor  # (w, C), a vector an image column


@torch.inference_mode()
def gates_of(model: Segmenter, image: Tensor) -> Gates:
    """What the gates of a CAA model in evaluation mode are for an image (3, H, W), uint8."""
    block, features = _block(model), []
    device = model.classifier.weight.device
    inputs = normalize(image[None].to(device), model.backbone.mean, model.backbone.std)
    with block.register_forward_pre_hook(lambda _, given: features.append(given[0])):
        model.coarse(inputs)
    maps = block.explain(features[0])
    assert maps.column_gate is not None
    assert maps.row_gate is not None
    return Gates(maps.column_gate[0].float().cpu(), maps.row_gate[0].float().cpu())


def _block(model: Segmenter) -> ChannelizedAxialAttention:
    block = model.head.block
    assert isinstance(block, ChannelizedAxialAttention)
    return block


def _flatten(
    block: ChannelizedAxialAttention, given: tuple[Tensor], _: Tensor, *, column: Flatness, row: Flatness
) -> Tensor:
    """A hook that gives another output than the block's."""
    return flattened(block, given[0], column=column, row=row)
