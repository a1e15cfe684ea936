"""What a recipe names, opened: its data and its network."""

import logging
import warnings
from pathlib import Path

import torch

from caaseg.config import Architecture, ModelConfig, Recipe
from caaseg.data.catalogue import find, open_dataset
from caaseg.data.joined import JoinedDataset
from caaseg.data.sample import SegmentationDataset
from caaseg.models import Segmenter, load_model
from caaseg.models.weights import check_fits, load_backbone_weights

logger = logging.getLogger(__name__)


def open_datasets(recipe: Recipe) -> tuple[SegmentationDataset, SegmentationDataset]:
    """The training and the validation split of a recipe, both with samples, and of as many classes as it says."""
    data = recipe.data
    train, val = open_split(recipe, data.train_split), open_split(recipe, data.val_split)
    wanted = recipe.model.num_classes
    for name, dataset in ((data.train_split, train), (data.val_split, val)):
        found = len(dataset.classes)
        if found != (wanted or len(train.classes)):
            raise ValueError(
                f"model.num_classes is {wanted or len(train.classes)}, but split {name} of {data.dataset} has {found} "
                "classes; leave it out to take the data's"
            )
    given = recipe.loss.class_weights
    if not isinstance(given, str) and len(given) != len(train.classes):
        raise ValueError(
            f"loss.class_weights has {len(given)} numbers, but {data.dataset} has {len(train.classes)} classes"
        )
    return train, val


def open_split(recipe: Recipe, names: str) -> SegmentationDataset:
    """A split of a recipe's dataset, or several joined with +, as the recipe's options say."""
    data = recipe.data
    if data.root is None and find(data.dataset).has_files:
        raise ValueError(f"data.root is missing: {data.dataset} needs the folder that its files are in; --data.root")
    root = None if data.root is None else Path(data.root)
    if root is not None and not root.is_dir():
        raise ValueError(
            f"data.root is {root}: no such folder; expected the one that holds {data.dataset}; --data.root"
        )
    parts = [open_dataset(data.dataset, root, name, **data.options) for name in names.split("+")]
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


def build_model(recipe: Recipe, data: SegmentationDataset, init_from: str | Path | None = None) -> Segmenter:
    """The network of a recipe for some data, from random weights that its seed decides or from another model's."""
    torch.manual_seed(recipe.seed)
    architecture = {name: getattr(recipe.model, name) for name in Architecture.names()}
    config = ModelConfig(
        **architecture, num_classes=len(data.classes), classes=tuple(data.classes), palette=tuple(data.palette)
    )
    pretrained = recipe.model.pretrained
    model = Segmenter(config, hub_weights=pretrained is True and init_from is None)
    if init_from is not None:
        with warnings.catch_warnings(record=True, action="always") as said:
            other = load_model(init_from, num_classes=config.num_classes)
        _check_same_network(model, other, init_from)
        for warning in said:
            logger.warning("%s", warning.message)
        model.load_state_dict(other.state_dict())
    elif not isinstance(pretrained, bool):
        load_backbone_weights(model.backbone, Path(pretrained))
    return model


def _check_same_network(model: Segmenter, other: Segmenter, source: str | Path) -> None:
    """Refuse weights of another network, by what it is: a list of its weights would tell nobody."""
    try:
        check_fits(model, other.state_dict(), str(source))
    except ValueError as error:
        names = Architecture.names()
        two = {name: (getattr(other.config, name), getattr(model.config, name)) for name in names}
        changed = {name: (found, wanted) for name, (found, wanted) in two.items() if found != wanted}
        if not changed:
            raise
        listed = ", ".join(f"{name} {found} instead of {wanted}" for name, (found, wanted) in changed.items())
        raise ValueError(
            f"{source}: its weights do not fit, for it has {listed}; give the same by --model.NAME, or start from "
            "another model"
        ) from error
