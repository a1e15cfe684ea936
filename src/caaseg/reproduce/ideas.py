"""Ideas for a better CAA model of CamVid from random weights: each is one change of camvid/caa_resnet18_long."""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Idea(NamedTuple):
    """One change of the recipe: values of its model, and other settings as command-line options."""

    name: str
    label: str
    model: Mapping[str, Any] = {}
    options: tuple[str, ...] = ()


IDEAS = (
    Idea("no_label_smoothing", "no label smoothing", options=("--loss.label_smoothing=0",)),
    Idea(
        "color_changes",
        "scales 0.5 to 2, with brightness and contrast changes",
        options=("--data.scales=0.5 2", "--data.brightness=32", "--data.contrast=0.4"),
    ),
    Idea("no_scaling", "no scaling", options=("--data.scales=1 1",)),
    Idea("decoder_stride2", "decoder at stride 2", model={"decoder": True, "decoder_stride": 2}),
    Idea("block_dropout", "dropout 0.2 in blocks", model={"block_dropout": 0.2}),
    Idea("batch8", "batches of 8, same number of epochs", options=("--batch_size=8",)),
    Idea("car", "class-aware regularization", model={"car": True}),
    Idea("plain_weights", "no EMA", options=("--optimizer.ema=none",)),
    Idea(
        "recomputed_batch_norm",
        "EMA with recomputed batch norm statistics",
        options=("--optimizer.ema=0.999", "--optimizer.ema_batch_norm=recomputed"),
    ),
    Idea(
        "rmsprop",
        "RMSprop, exponential schedule",
        options=(
            *("--optimizer.name=rmsprop", "--optimizer.lr=0.001", "--optimizer.weight_decay=0.0001"),
            *("--optimizer.schedule=exponential", "--optimizer.final_lr_factor=0.0067", "--optimizer.clip_grad_norm=4"),
        ),
    ),
)
NOTES = (
    "This is not a table of the paper: each row makes one change to the recipe of the first row.",
    "The row rmsprop has the learning rates and the gradient clipping of FC-DRN; we chose its weight decay.",
    "Dilation only in a fine-tuning phase is not a row, because it takes two runs; docs/results.md has the commands.",
)
