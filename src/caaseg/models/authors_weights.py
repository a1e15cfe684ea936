"""Names and axis order of the authors' TensorFlow variables, converted to those of a `Segmenter`.

The names are paths in a TensorFlow checkpoint, without the leading model/ and the trailing
/.ATTRIBUTES/VARIABLE_VALUE: backbone/stacks/0/blocks/2/conv2_conv/kernel. Two repositories name the parts of the
head differently: edwardyehuang/CAA (seg_head) and edwardyehuang/CAR (head).
"""

import re
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

KINDS = {
    "kernel": "weight",
    "depthwise_kernel": "weight",
    "bias": "bias",
    "gamma": "weight",
    "beta": "bias",
    "moving_mean": "running_mean",
    "moving_variance": "running_var",
}
"""Last component of a variable's name -> last component of the parameter's or buffer's name."""

PARTS = {
    "seg_head/entry_convbnrelu": "head.entry",
    "seg_head/end_convbnrelu": "head.exit",
    "seg_head/image_level_block/convbnrelu": "head.image_level",
    "seg_head/ca_blocks/0": "head.block",
    "seg_head_convbnrelu": "head.bottleneck",
    "logits_conv": "classifier",
    "aux_feature_convbnrelu0": "aux.0",
    "aux_loss_logits_conv": "aux.2",
    "head/attention_entry_conv": "head.entry",
    "head/attention_end_conv": "head.exit",
    "head/image_level_block/convbnrelu": "head.image_level",
    "head/caa_block": "head.block",
    "head/gta/linear_conv": "head.car",
    "head/end_conv": "head.bottleneck",
    "head/jpu": "neck",
    "backbone": "backbone.net",
}
"""Path of a part of the model -> name of the module."""

BLOCK_PARTS = {
    "v_querykey_convbnrelu": "column_keys",
    "h_querykey_convbnrelu": "row_keys",
    "value_convbnrelu": "values",
    "v_c_attention": "column_gate",
    "h_c_attention": "row_gate",
}
"""Attention block; v attends along columns."""

STEM = {
    "conv1_1_conv": "conv1.0",
    "conv1_1_bn": "conv1.1",
    "conv1_2_conv": "conv1.3",
    "conv1_2_bn": "conv1.4",
    "conv1_3_conv": "conv1.6",
    "conv1_3_bn": "bn1",
    "stem_conv": "conv_stem",
    "steam_conv_bn": "bn1",
    "stem_conv_bn": "bn1",
    "top_conv": "conv_head",
    "top_bn": "bn2",
}
"""Stem of the ResNet; stem and top of the EfficientNet. "steam" is the authors' spelling."""

EXPANDING = {
    "expand_conv": "conv_pw",
    "expand_conv_bn": "bn1",
    "dwconv": "conv_dw",
    "dwconv_bn": "bn2",
    "project_conv": "conv_pwl",
    "project_bn": "bn3",
}
NOT_EXPANDING = {"dwconv": "conv_dw", "dwconv_bn": "bn1", "project_conv": "conv_pw", "project_bn": "bn2"}
SQUEEZE = {"se_reduce": "se.conv_reduce", "se_expand": "se.conv_expand"}
"""Blocks of an EfficientNet. Blocks of the first stage have no expansion."""


def torch_name(variable: str, stages: Sequence[int] = ()) -> str | None:
    """Return the name that a variable of the authors' models has in a `Segmenter`, or None for unknown variables.

    Args:
        variable: name of the variable.
        stages: number of blocks per stage of an EfficientNet. The authors number its blocks consecutively.
    """
    path, _, kind = variable.rpartition("/")
    part = next((part for part in PARTS if path == part or path.startswith(f"{part}/")), None)
    if part is None or kind not in KINDS:
        return None
    inner = path[len(part) + 1 :]
    module = PARTS[part]
    if module == "backbone.net":
        found = STEM.get(inner) or _resnet_layer(inner) or _efficientnet_layer(inner, stages)
    elif module == "head.block":
        found = _attention_layer(inner)
    elif module == "neck":
        found = _jpu_layer(inner)
    else:
        found = _unit_layer(inner)
    return None if found is None else ".".join(filter(None, (module, found, KINDS[kind])))


def _unit_layer(inner: str) -> str | None:
    """Return the layer's index in a unit of convolution and batch norm; empty for a convolution alone."""
    return {"conv": "0", "bn": "1", "": ""}.get(inner)


def _attention_layer(inner: str) -> str | None:
    name, _, rest = inner.partition("/")
    module = BLOCK_PARTS.get(name)
    if module is None:
        return None
    if name.endswith("_c_attention"):
        hidden = re.fullmatch(r"denses/(\d+)", rest)
        layer = f"hidden.{hidden[1]}" if hidden else "last" if rest == "dense_end" else None
    else:
        layer = _unit_layer(rest)
    return None if layer is None else f"{module}.{layer}"


def _jpu_layer(inner: str) -> str | None:
    found = re.fullmatch(
        r"(endpoints_convs|end_depthwise_convs|end_depthwise_bns|end_pointwise_convs)/(\d+)(.*)", inner
    )
    if found is None:
        return None
    group, number, rest = found[1], found[2], _unit_layer(found[3].removeprefix("/"))
    if rest is None:
        return None
    if group == "endpoints_convs":
        return f"entries.{number}.{rest}"
    layer = {"end_depthwise_convs": "0", "end_depthwise_bns": "1", "end_pointwise_convs": f"2.{rest}"}[group]
    return f"branches.{number}.{layer}"


def _resnet_layer(inner: str) -> str | None:
    found = re.fullmatch(r"stacks/(\d+)/blocks/(\d+)/(conv[123]|shortcut)_(conv|bn)", inner)
    if found is None:
        return None
    stage, block, layer, kind = int(found[1]) + 1, found[2], found[3], found[4]
    if layer == "shortcut":
        return f"layer{stage}.{block}.downsample.{0 if kind == 'conv' else 1}"
    return f"layer{stage}.{block}.{kind}{layer[-1]}"


def _efficientnet_layer(inner: str, stages: Sequence[int]) -> str | None:
    found = re.fullmatch(r"blocks/(\d{1,4})/(\w+)", inner)
    if found is None:
        return None
    block = int(found[1])
    for stage, length in enumerate(stages):
        if block < length:
            names = {**(EXPANDING if stage else NOT_EXPANDING), **SQUEEZE}
            return f"blocks.{stage}.{block}.{names[found[2]]}" if found[2] in names else None
        block -= length
    return None


def torch_weight(variable: str, array: NDArray[np.float32]) -> Tensor:
    """Return a variable in PyTorch's axis order: HWIO, depthwise HWC1 or [in, out] become OIHW, C1HW or [out, in]."""
    tensor = torch.from_numpy(np.array(array, dtype=np.float32))
    if variable.endswith("/depthwise_kernel") and tensor.ndim == 4:
        return tensor.permute(2, 3, 0, 1).contiguous()
    if variable.endswith("/kernel") and tensor.ndim == 4:
        return tensor.permute(3, 2, 0, 1).contiguous()
    return tensor.T.contiguous() if tensor.ndim == 2 else tensor
