"""What a model, and what a run is: frozen dataclasses, checked when they are made.

One run is one recipe, complete in one file. Nothing here imports torch, so that `caaseg train --help` is instant.
"""

import difflib
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, Self, get_args

HEAD_NAMES = ("fcn", "axial", "axial_se", "caa", "self_attention", "channelized_self_attention", "danet")
Activation = Literal["leaky_relu", "relu"]
Implementation = Literal["auto", "factorised", "grouped", "loop", "fused"]
OutputStride = Literal[8, 16]
ResNetVariant = Literal["standard", "authors"]
Color = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of all settings: they are frozen, and a changed copy is checked like a new one."""

    def replace(self, **changes: Any) -> Self:
        """Return a copy with other values."""
        return replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Return all values, nested settings as dictionaries."""
        return asdict(self)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all values."""
        return [one.name for one in fields(cls)]


@dataclass(frozen=True, kw_only=True)
class Architecture(Settings):
    """A network but for what the data decide."""

    head: str = "caa"
    """fcn, axial, axial_se, caa, self_attention, channelized_self_attention or danet."""
    backbone: str = "resnet50"
    """A timm model that supports features_only and output_stride."""
    output_stride: OutputStride = 16
    """How many pixels a feature of the head stands for: 8 or 16."""
    stages: int | None = None
    """How many stages of the backbone are used, each ending in a feature of stride 4 or coarser; none takes all."""
    input_upsampling: float = 1.0
    """How many times as large as they are given images go through the network, 1 to 4: thin things show better."""
    aux: bool = False
    """Whether an auxiliary branch on the backbone's feature is trained along."""
    decoder: bool = False
    """Whether the simple decoder refines the result at stride 4."""
    decoder_channels: int = 256
    """Channels of the decoder's result; it computes most of what a small network does."""
    multi_grid: tuple[int, ...] | None = None
    """Dilation factors of the blocks of the last ResNet stage, such as (1, 2, 4)."""
    resnet_variant: ResNetVariant = "standard"
    """The standard ResNet, or the authors' (deep stem, strides in the last blocks)."""
    channels: int = 512
    """Channels of the head's entry convolution, of the attention's values and of what follows."""
    key_channels: int = 64
    """Channels of queries and keys."""
    gate_layers: int = 5
    """Hidden layers of a channel gate."""
    gate_width: int = 128
    """Units of a hidden layer of a channel gate."""
    gate_activation: Activation = "leaky_relu"
    """Activation inside a channel gate: leaky_relu or relu."""
    implementation: Implementation = "auto"
    """How channelized axial attention is computed; all give the same numbers."""
    groups: int = 16
    """Number of slices of the implementation "grouped"."""
    se_first: bool = True
    """For axial_se: squeeze-and-excitation before the axial attention, or after it."""

    def __post_init__(self) -> None:
        if self.head not in HEAD_NAMES:
            close = difflib.get_close_matches(str(self.head), HEAD_NAMES, n=1)
            hint = f" (did you mean {close[0]}?)" if close else ""
            raise ValueError(f"head is {self.head!r}{hint}; expected one of {', '.join(HEAD_NAMES)}")
        _among(self, "output_stride", OutputStride)
        _among(self, "resnet_variant", ResNetVariant)
        _among(self, "gate_activation", Activation)
        _among(self, "implementation", Implementation)
        if not 1 <= self.input_upsampling <= 4:
            raise ValueError(f"input_upsampling is {self.input_upsampling}; expected a factor from 1 to 4")
        if self.stages is not None:
            if not _is_whole(self.stages, 1, 100):
                raise ValueError(f"stages is {self.stages!r}; expected a whole number from 1, or none for all")
            if self.resnet_variant == "authors":
                raise ValueError(
                    f"stages is {self.stages}, but resnet_variant authors is the paper's network, whole; leave out one"
                )
        _whole(self, 1, 65_536, "channels", "key_channels", "gate_width", "groups", "decoder_channels")
        _whole(self, 1, 100, "gate_layers")
        if self.multi_grid is not None and not all(_is_whole(factor, 1, 1000) for factor in self.multi_grid):
            raise ValueError(f"multi_grid is {self.multi_grid}; expected whole numbers from 1, one a block, or none")


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Architecture):
    """All that is needed to build a model again."""

    num_classes: int
    """Number of classes."""
    classes: tuple[str, ...] | None = None
    """Names of the classes."""
    palette: tuple[Color, ...] | None = None
    """Colors of the classes, RGB."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, 1, 255, "num_classes")  # labels are one byte, and 255 is ignored
        for name in ("classes", "palette"):
            given = getattr(self, name)
            if given is not None and len(given) != self.num_classes:
                raise ValueError(f"{name} has {len(given)} entries, but num_classes is {self.num_classes}")
        if self.classes is not None and not all(isinstance(name, str) for name in self.classes):
            raise ValueError(f"classes are {self.classes}; expected names, one a class")
        for color in self.palette or ():
            if len(color) != 3 or not all(_is_whole(value, 0, 255) for value in color):
                raise ValueError(f"palette has {color}; expected red, green and blue from 0 to 255, one color a class")


@dataclass(frozen=True, kw_only=True)
class ModelRecipe(Architecture):
    """The network of a run."""

    num_classes: int | None = None
    """Number of classes; none takes the data's. Another number than the data's is refused before the first step."""
    pretrained: bool | str = False
    """Start the backbone from timm's ImageNet weights (true), or from a file of backbone weights."""


@dataclass(frozen=True, kw_only=True)
class Augmentation(Settings):
    """Random changes of training samples: scale, crop, flip and color."""

    crop: tuple[int, int] = (513, 513)
    """Height and width of training crops."""
    scales: tuple[float, float] = (0.5, 2.0)
    """Smallest and largest random scale."""
    scale_step: float | None = 0.25
    """Scales are drawn in such steps; none takes any in between."""
    flip: float = 0.5
    """Probability of being mirrored."""
    brightness: float = 0.0
    """Most that is added to or taken from all values of half of the images; the authors' code has 32."""
    contrast: float = 0.0
    """Most by which the factor of contrast differs from 1."""
    saturation: float = 0.0
    """Most by which the factor of saturation differs from 1."""

    def __post_init__(self) -> None:
        smallest, largest = self.scales
        if min(self.crop) < 1:
            raise ValueError(f"crop is {self.crop[0]} x {self.crop[1]}; expected at least 1 on each side")
        if not 1 / 16 <= smallest <= largest <= 16:
            raise ValueError(f"scales are {smallest} to {largest}; expected smallest to largest, from 1/16 to 16")
        if self.scale_step is not None and not self.scale_step >= 1 / 1024:
            raise ValueError(f"scale_step is {self.scale_step}; expected {1 / 1024} or more, or none for any scale")
        for name, most in (("flip", 1), ("brightness", 255), ("contrast", 1), ("saturation", 1)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}; expected 0 to {most}")


@dataclass(frozen=True, kw_only=True)
class DataRecipe(Augmentation):
    """What a run learns from, and what its samples go through."""

    dataset: str
    """A name of `caaseg data list`."""
    root: str | None = None
    """Folder of the dataset; none for scenes, which are drawn."""
    train_split: str = "train"
    """What is learned from; several joined with +, such as train+val."""
    val_split: str = "val"
    """What is scored during training."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of the dataset, such as size and difficulty of scenes."""
    workers: int = 4
    """Processes that read beside each training process."""
    cache: bool = False
    """Keep decoded images in memory, read once by each training process: for datasets that fit."""
    bad_files: Literal["stop", "skip"] = "stop"
    """What to do with a file that cannot be read during training."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(self, 0, "workers")


@dataclass(frozen=True, kw_only=True)
class LossRecipe(Settings):
    """What is made small. Sums run over the labelled pixels of a whole step, on all devices."""

    aux_weight: float = 0.4
    """Weight of the auxiliary branch's loss."""
    branch_weight: float = 1.0
    """Weight of the loss of each further branch (danet: spatial, channel; axial_se: channel)."""
    class_weights: Literal["none", "log"] | tuple[float, ...] = "none"
    """None, 1 / log(1.1 + frequency) from the training labels, or one number a class."""
    ohem: float | None = None
    """Learn from the hardest share of the labelled pixels alone, such as 0.25; none learns from all."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "aux_weight", "branch_weight")
        if self.ohem is not None and not 0 < self.ohem <= 1:
            raise ValueError(f"ohem is {self.ohem}; expected a share above 0, at most 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerRecipe(Settings):
    """How the weights are moved."""

    name: Literal["sgd", "adamw"] = "sgd"
    """SGD with momentum, or AdamW."""
    lr: float = 0.01
    """Learning rate at the start of the schedule."""
    momentum: float = 0.9
    """Of SGD."""
    weight_decay: float = 2e-4
    """On kernels alone, in PyTorch's convention: twice the factor of an L2 loss."""
    head_lr_factor: float = 1.0
    """Factor of the learning rate for everything behind the backbone."""
    schedule: Literal["poly", "cosine"] = "poly"
    """How the learning rate falls to 0."""
    power: float = 0.9
    """Of the poly schedule."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from 0."""
    clip_grad_norm: float | None = None
    """Largest norm of the gradient; none leaves it."""
    ema: float | None = None
    """Decay of a running mean of the weights, such as 0.999, which is then what is scored and saved."""

    def __post_init__(self) -> None:
        _at_least(self, 0, "lr", "weight_decay", "head_lr_factor", "warmup_steps", "power")
        for name in ("momentum", "ema"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise ValueError(f"{name} is {value}; expected 0 or more and below 1")
        if self.clip_grad_norm is not None and self.clip_grad_norm <= 0:
            raise ValueError(f"clip_grad_norm is {self.clip_grad_norm}; expected a norm above 0, or none")


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """A run, whole."""

    model: ModelRecipe
    """The network."""
    data: DataRecipe
    """What it learns from."""
    loss: LossRecipe = field(default_factory=LossRecipe)
    """What is made small."""
    optimizer: OptimizerRecipe = field(default_factory=OptimizerRecipe)
    """How the weights are moved."""
    steps: int = 40_000
    """Optimizer steps."""
    batch_size: int = 16
    """Images a step, over all devices and accumulation steps together."""
    accumulate: int = 1
    """Parts that a step is computed in, one after the other, to save memory."""
    precision: Literal["32", "bf16", "16"] = "32"
    """What autocast computes in."""
    channels_last: bool = True
    """Memory layout of the network."""
    compile: bool = False
    """Compile the network with torch.compile."""
    cuda_graph: bool = False
    """Record the network's step once and replay it, where there is one GPU: launching kernels then takes no time."""
    fused_batch_norm: bool = False
    """Normalize, add shortcuts and take ReLU in few passes over the features, where there is one GPU."""
    deterministic: bool = False
    """Use deterministic algorithms alone: two runs give identical weights."""
    seed: int = 0
    """Decides initial weights, order and augmentation."""
    validate_every: int = 1000
    """Steps between two scorings of the validation split; the last step is always scored."""
    checkpoint_every: int = 500
    """Steps between two checkpoints."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "steps", "batch_size", "accumulate", "validate_every", "checkpoint_every")
        _at_least(self, 0, "seed")
        if self.cuda_graph and (self.compile or self.accumulate > 1):
            raise ValueError("cuda_graph is true, which goes neither with compile nor with accumulate above 1")
        if self.batch_size % self.accumulate:
            raise ValueError(
                f"batch_size is {self.batch_size}, which {self.accumulate} accumulation steps do not divide evenly"
            )


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _whole(config: object, least: int, most: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not _is_whole(value, least, most):
            raise ValueError(f"{name} is {value!r}; expected a whole number from {least} to {most}")


def _at_least(config: object, least: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not value >= least:
            raise ValueError(f"{name} is {value}; expected {least} or more")


def _among(config: object, name: str, literal: Any) -> None:
    value = getattr(config, name)
    if value not in get_args(literal):
        raise ValueError(f"{name} is {value!r}; expected {' or '.join(map(str, get_args(literal)))}")
