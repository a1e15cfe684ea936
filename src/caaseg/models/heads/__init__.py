"""Segmentation heads by name. Importing this package does not import torch."""

import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from caaseg.errors import CaasegError

if TYPE_CHECKING:
    from caaseg.models.heads.base import Head

HEADS = {
    "fcn": "caaseg.models.heads.fcn:FCNHead",
    "axial": "caaseg.models.heads.axial:AxialHead",
    "axial_se": "caaseg.models.heads.axial:AxialSEHead",
    "caa": "caaseg.models.heads.axial:CAAHead",
    "self_attention": "caaseg.models.heads.self_attention:SelfAttentionHead",
    "channelized_self_attention": "caaseg.models.heads.self_attention:ChannelizedSelfAttentionHead",
    "danet": "caaseg.models.heads.danet:DANetHead",
    "psp": "caaseg.models.heads.psp:PSPHead",
    "deeplabv3": "caaseg.models.heads.deeplab:DeepLabV3Head",
    "deeplabv3plus": "caaseg.models.heads.deeplab:DeepLabV3PlusHead",
    "upernet": "caaseg.models.heads.upernet:UPerNetHead",
    "segformer": "caaseg.models.heads.segformer:SegFormerHead",
    "nonlocal": "caaseg.models.heads.nonlocal_block:NonLocalHead",
    "ccnet": "caaseg.models.heads.ccnet:CCNetHead",
    "emanet": "caaseg.models.heads.emanet:EMANetHead",
    "ann": "caaseg.models.heads.ann:ANNHead",
    "encnet": "caaseg.models.heads.encnet:EncNetHead",
    "ocr": "caaseg.models.heads.ocr:OCRHead",
}
"""Head name -> "module:Class"."""


def head_class(name: str) -> "type[Head]":
    """Return the class of a built-in head by its name."""
    if name not in HEADS:
        raise CaasegError(f"head is {name!r}, which is not built in; pass its class: head=MyHead")
    module, _, class_name = HEADS[name].partition(":")
    found: type[Head] = getattr(import_module(module), class_name)
    return found


def resolve_head(head: "str | type[Head]") -> "type[Head]":
    """Return the class of a head.

    Args:
        head: a name in `HEADS`, the class itself, or "file.py:Class", which executes the file: pass only strings that
            the user typed, never strings read from a saved model.
    """
    if not isinstance(head, str):
        return head
    return head_class(head) if head in HEADS else _class_in_file(head)


def own_head(name: str) -> str | None:
    """Return the head of a recipe if it is file.py:Class, for `load_model`, which needs it; None if it is built in."""
    return None if name in HEADS else name


def _class_in_file(head: str) -> "type[Head]":
    from caaseg.models.heads.base import Head

    file, _, name = head.rpartition(":")
    path = Path(file)
    if path.suffix != ".py":
        raise CaasegError(f"head is {head!r}; expected one of {', '.join(HEADS)}, or file.py:Class")
    if not path.is_file():
        raise CaasegError(f"head is {head!r}: {file} is not a file; expected a Python file with the class {name}")
    module_name = "caaseg_head_" + re.sub(r"\W", "_", str(path.resolve()))
    if module_name in sys.modules:
        module = sys.modules[module_name]
    else:
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[module_name]
            raise
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Head)):
        raise CaasegError(f"head is {head!r}: {file} has no subclass of caaseg.models.heads.base.Head named {name}")
    return found
