"""Settings of models and training runs, with bounds, defaults and help. Does not import torch."""

import unicodedata
from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from caaseg.errors import CaasegError
from caaseg.models.heads import HEADS
from caaseg.settings import Settings, flat_fields

HEAD_NAMES = tuple(HEADS)
Activation = Literal["leaky_relu", "relu"]
Dilation = Literal["authors", "timm"]
Difficulty = Literal["easy", "medium", "hard"]
Implementation = Literal["auto", "factorised", "grouped", "loop", "fused"]
NeckName = Literal["resize", "jpu", "sfp"]
OutputStride = Literal[8, 16, 32]
LoggerName = Literal["tensorboard", "csv", "wandb", "mlflow"]
ResNetVariant = Literal["standard", "authors"]

RENAMED = {
    "data.keep": "data.cache",
    "data.options": "data.scenes or data.folder",
    "enlarge": "input_upsampling",
    "fused_normalisation": "fused_batch_norm",
    "model.enlarge": "model.input_upsampling",
    "optimiser": "optimizer",
    "optimizer.clip": "optimizer.clip_grad_norm",
}
"""Keys of earlier versions, and their names today."""
OTHER_TOOLS = {"learning_rate": "optimizer.lr", "num_workers": "data.workers", "imgsz": "data.crop"}
"""Options of other tools, and the corresponding keys of a recipe."""


def _checked_head(name: str) -> str:
    if name not in HEAD_NAMES and ":" not in name:
        raise ValueError(f"{', '.join(HEAD_NAMES)}, or file.py:Class")
    return name


def _split_size(value: Any) -> Any:
    """Return [352, 480] for "352x480" and for ["352x480"], and [513, 513] for [513]; other values unchanged."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list | tuple) and len(parts) == 1:
        parts = str(parts[0]).lower().split("x")
        return [int(part) if part.isdecimal() else part for part in (parts * 2 if len(parts) == 1 else parts)]
    return value


def _ordered_scales(scales: tuple[float, float]) -> tuple[float, float]:
    if not 1 / 16 <= scales[0] <= scales[1] <= 16:
        raise ValueError("the smallest, then the largest, from 1/16 to 16")
    return scales


def _none_as_null(value: Any) -> Any:
    return None if value == "none" else value


Count = Annotated[int, Field(strict=True, ge=1)]
Width = Annotated[int, Field(strict=True, ge=1, le=65_536)]
Byte = Annotated[int, Field(strict=True, ge=0, le=255)]
Workers = Annotated[int, Field(strict=True, ge=0, le=256)]
Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Color = tuple[Byte, Byte, Byte]
MaskValue = Annotated[int, Field(strict=True, ge=0, lt=65_536)]
MaskValues = tuple[MaskValue, ...] | tuple[Color, ...]
Side = Annotated[int, Field(strict=True, ge=1, le=1_000_000)]
Size = Annotated[tuple[Side, Side], BeforeValidator(_split_size)]


class Architecture(Settings):
    """Architecture settings that do not depend on the dataset."""

    head: Annotated[str, AfterValidator(_checked_head)] = "caa"
    """Head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention, danet, psp, deeplabv3,
    deeplabv3plus, upernet, segformer, nonlocal, ccnet, emanet, ann, encnet, ocr, or file.py:Class."""
    backbone: str = "resnet50"
    """Backbone: a timm model; caaseg models lists them, and which output strides and necks they support."""
    output_stride: OutputStride = 16
    """Stride of the features that the head reads."""
    stages: Annotated[int, Field(strict=True, ge=1, le=100)] | None = None
    """Number of backbone stages, each ending in features of stride 4 or coarser; none uses all."""
    input_upsampling: Annotated[float, Field(ge=1, le=4)] = 1.0
    """Input upsampling factor; larger inputs help with thin objects."""
    aux: bool = False
    """Train an auxiliary classifier on the backbone's features."""
    aux_stage: Annotated[int, Field(strict=True, ge=1, le=4)] | None = None
    """Backbone stage that the auxiliary classifier reads, from 1, with a 3x3 convolution; mmsegmentation uses 3. None
    reads the input of the head with a 1x1 convolution, like the authors."""
    decoder: bool = False
    """Refine the result with the simple decoder at stride 4."""
    decoder_stride: Literal[2, 4] = 4
    """Stride of the decoder's output. 2 adds a refinement step that reads the backbone's stride-2 features."""
    decoder_channels: Width = 256
    """Output channels of the decoder."""
    multi_grid: tuple[Annotated[int, Field(strict=True, ge=1, le=1000)], ...] | None = None
    """Dilation factors of the blocks of the last ResNet stage, such as 1 2 4."""
    resnet_variant: ResNetVariant = "standard"
    """Standard ResNet, or the authors' (deep stem, strides in the last blocks)."""
    dilation: Dilation | None = None
    """Dilation of a block whose stride is removed: the new rate (authors) or the previous rate (timm); none selects
    authors for resnet_variant authors, and timm for standard."""
    top_features: bool = False
    """For an EfficientNet: use the features after its top convolution, batch norm and activation, like the authors."""
    neck: Annotated[NeckName | None, BeforeValidator(_none_as_null)] = None
    """Module between backbone and head, instead of dilation: resize (all feature maps resized to the output stride and
    joined), jpu (joint pyramid upsampling: strides 8, 16 and 32 joined at stride 8), sfp (simple feature pyramid of
    strides 4 to 32 from a plain ViT), or none."""
    car: bool = False
    """Class-aware regularization (CAR): a linear layer before the classifier, with losses on its features."""
    min_size: Size | None = None
    """Pad smaller images with gray to this height and width before prediction; the authors' code uses 513 513."""
    channels: Width = 512
    """Channels of the head."""
    bottleneck_channels: Width = 256
    """Channels before the classifiers of attention heads, emanet and the auxiliary branch."""
    key_channels: Width = 64
    """Channels of queries and keys."""
    gate_layers: Annotated[int, Field(strict=True, ge=1, le=100)] = 5
    """Hidden layers of each channel gate."""
    gate_width: Width = 128
    """Units per hidden layer of a channel gate."""
    gate_activation: Activation = "leaky_relu"
    """Activation in the channel gates."""
    implementation: Implementation = "auto"
    """Implementation of channelized axial attention; all give the same numbers."""
    groups: Width = 16
    """Number of groups of the implementation "grouped"."""
    se_first: bool = True
    """For axial_se: squeeze-and-excitation before the axial attention instead of after it."""
    num_convs: Annotated[int, Field(strict=True, ge=1, le=100)] = 1
    """For fcn: number of 3x3 convolutions; mmsegmentation uses 2."""
    concat_input: bool = False
    """For fcn: a further 3x3 convolution of the backbone's features and the convolved features together, like
    mmsegmentation."""
    aspp_rates: tuple[Annotated[int, Field(strict=True, ge=1, le=1000)], ...] | None = None
    """For deeplabv3 and deeplabv3plus: dilation rates of the 3x3 convolutions; none selects 12 24 36 at output stride
    8, 6 12 18 at 16, and 3 6 9 at 32."""
    recurrence: Annotated[int, Field(strict=True, ge=1, le=100)] = 2
    """For ccnet: how often its attention is applied."""
    lateral: bool = False
    """For encnet: join the features of the last three backbone stages, instead of using those of the last."""

    @model_validator(mode="after")
    def _check_stages(self) -> Self:
        if self.stages is not None and self.resnet_variant == "authors":
            raise ValueError(f"stages is {self.stages}, but resnet_variant authors uses all stages; omit one of them")
        if self.stages is not None and self.top_features:
            raise ValueError(f"stages is {self.stages}, but top_features needs all stages; omit one of them")
        return self

    @model_validator(mode="after")
    def _check_decoder_stride(self) -> Self:
        if self.decoder_stride == 2 and not self.decoder:
            raise ValueError("decoder_stride is 2, but decoder is false; set decoder true, or omit decoder_stride")
        if self.decoder_stride == 2 and self.neck == "sfp":
            raise ValueError("decoder_stride is 2, but neck sfp has no features of stride 2; use decoder_stride 4")
        return self

    @model_validator(mode="after")
    def _check_neck(self) -> Self:
        if self.neck is None:
            return self
        if self.neck == "jpu" and self.output_stride != 8:
            raise ValueError(f"output_stride is {self.output_stride}, but neck {self.neck} gives 8; use 8")
        others = {
            "stages": self.stages,
            "multi_grid": self.multi_grid,
            "dilation": self.dilation,
            "top_features": self.top_features,
            "resnet_variant": self.resnet_variant != "standard",
        }
        for name, value in others.items():
            if value:
                raise ValueError(f"{name} is {getattr(self, name)}, but neck {self.neck} does not support it; omit it")
        return self


def has_surrogates(text: str) -> bool:
    """Return whether a text has surrogates, halves of characters that no file can store. JSON and YAML allow them."""
    return any(unicodedata.category(character) == "Cs" for character in text)


class ModelConfig(Architecture):
    """Everything needed to build a model."""

    num_classes: Annotated[int, Field(strict=True, ge=1, le=255)]  # labels are uint8, and 255 is ignored
    """Number of classes."""
    classes: tuple[str, ...] | None = None
    """Names of the classes."""
    palette: tuple[Color, ...] | None = None
    """RGB colors of the classes."""
    mask_values: MaskValues | None = None
    """Value or color of each class in the masks of the dataset folder that the model was trained on."""
    short_sides: tuple[Count, Count, Count] | None = None
    """Smallest, median and largest short side of the training images; photos outside this range are resized to the
    median before prediction."""
    license: str | None = None
    """License of the weights, such as CC-BY-NC-4.0; models that start from these weights have it too."""

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        for name in ("classes", "palette", "mask_values"):
            entries = getattr(self, name)
            if entries is not None and len(entries) != self.num_classes:
                raise ValueError(f"{name} has {len(entries)} entries, but num_classes is {self.num_classes}")
        for name in self.classes or ():
            if has_surrogates(name):
                raise ValueError(f"classes has the name {name!r}; expected valid Unicode")
        return self


class ModelRecipe(Architecture):
    """Model of a training run."""

    num_classes: Annotated[int, Field(strict=True, ge=1, le=255)] | None = None
    """Number of classes, which must equal the dataset's; none takes it from the dataset."""
    pretrained: bool | str = False
    """Initialize the backbone with timm's ImageNet weights (true) or with a file of backbone weights."""
    freeze_backbone: bool = False
    """Do not train the backbone: its weights and batch norm statistics do not change."""
    frozen_stages: Annotated[int, Field(strict=True, ge=0, le=1000)] = 0
    """Number of first backbone stages that are not trained, weights and batch norm statistics, as timm counts them:
    layer1 to layer4 of a ResNet, with the stem in the first; of a ViT the blocks, with the embeddings in the first."""
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop path rate (stochastic depth) of the backbone's last block in training; it rises from 0 at the first."""
    block_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout rate before the last convolution of each ResNet block in training; FC-DRN uses 0.2."""
    gradient_checkpointing: bool = False
    """Compute the backbone's activations again in the backward pass instead of storing them: less memory, slower."""


class Augmentation(Settings):
    """Random changes of training samples: rotation, scale, crop, flip, color and blur."""

    crop: Size = (513, 513)
    """Height and width of training crops."""
    scales: Annotated[tuple[float, float], AfterValidator(_ordered_scales)] = (0.5, 2.0)
    """Smallest and largest random scale."""
    scale_step: Annotated[float, Field(ge=1 / 1024)] | None = 0.25
    """Step between random scales; none draws any scale in between."""
    flip: Share = 0.5
    """Probability of a horizontal flip."""
    brightness: Annotated[float, Field(ge=0, le=255)] = 0.0
    """Largest change of brightness, applied to half of the images; the authors' code uses 32."""
    contrast: Share = 0.0
    """Largest change of the contrast factor."""
    saturation: Share = 0.0
    """Largest change of the saturation factor."""
    hue: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Largest shift of the hue, as a fraction of the color circle."""
    grayscale: Share = 0.0
    """Probability of a grayscale image."""
    blur: Share = 0.0
    """Probability of a Gaussian blur with a standard deviation of up to 2 pixels."""
    rotation: Annotated[float, Field(ge=0, le=180)] = 0.0
    """Largest rotation in degrees; corners outside the image get the ignore label."""


class ScenesOptions(Settings):
    """Options of the dataset scenes."""

    length: Annotated[int, Field(strict=True, ge=1)] | None = None
    """Number of scenes; none takes the split's default."""
    size: Size = (128, 128)
    """Height and width of a scene, at least 64."""
    difficulty: Difficulty = "medium"
    """Number of houses and lamps, and the amount of noise."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Random seed of the scenes."""


class FolderOptions(Settings):
    """Options of the dataset folder."""

    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Fraction of the images in the validation split, where the directory defines no splits."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Random seed of that split."""


class DataRecipe(Augmentation):
    """Dataset and augmentation of a training run."""

    dataset: str
    """Dataset name; caaseg data list shows all."""
    root: str | None = None
    """Directory of the dataset; none for scenes, which need no files."""
    resize: Literal["auto"] | Count | None = None
    """Largest short side of training images; larger images are resized. Auto: twice the crop if the images are more
    than three times as large as the crop. The model stores this size and resizes photos to it."""
    train_split: str = "train"
    """Training split; several joined with +, such as train+val."""
    val_split: str = "val"
    """Validation split."""
    scenes: ScenesOptions = ScenesOptions()
    """Options of the dataset scenes."""
    folder: FolderOptions = FolderOptions()
    """Options of the dataset folder."""
    workers: Workers = 4
    """Data loading processes per training process."""
    cache: bool | Literal["device"] = False
    """Cache decoded images in memory, once per training process. Device: hold the training images in the memory of the
    GPU, and augment them there; for small datasets."""
    bad_files: Literal["stop", "skip"] = "stop"
    """Stop training at a file that cannot be read, or skip the file with a warning."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of this recipe's dataset, as keyword arguments."""
        options = getattr(self, self.dataset, None)
        return dict(options) if isinstance(options, Settings) else {}


class LossRecipe(Settings):
    """Training losses, averaged over a whole step, on all devices."""

    aux_weight: NotNegative = 0.4
    """Weight of the auxiliary loss."""
    branch_weight: NotNegative = 1.0
    """Weight of the loss of each further branch (danet: spatial, channel; axial_se: channel; ocr: regions)."""
    presence_weight: NotNegative = 0.2
    """Weight of the loss of a head that predicts which classes an image contains (encnet)."""
    class_weights: Literal["none", "log"] | tuple[NotNegative, ...] = "none"
    """Class weights: none, log for 1 / log(1.1 + frequency), or one number per class."""
    ohem: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of hardest pixels to train on (online hard example mining); none uses all pixels."""
    car_intra_weight: NotNegative = 1.0
    """For model.car: weight of the distance of pixels from the center of their class."""
    car_inter_weight: NotNegative = 1.0
    """For model.car: weight of the similarity of centers, and of pixels, to the centers of other classes."""
    car_c2c_threshold: Share = 0.5
    """For model.car: similarity between centers that is not penalized, summed over the other classes."""
    car_c2p_threshold: Share = 0.25
    """For model.car: similarity of pixels to other centers that is not penalized, summed over the other classes."""
    average: Literal["labeled", "all"] = "labeled"
    """Divide the loss by the number of labeled pixels, or of all pixels, like the authors' code."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Label smoothing of the cross entropy."""
    cross_entropy: NotNegative = 1.0
    """Weight of the cross entropy."""
    dice: NotNegative = 0.0
    """Weight of the Dice loss."""
    focal: NotNegative = 0.0
    """Weight of the focal loss."""
    focal_gamma: NotNegative = 2.0
    """Exponent of the focal loss; 0 is cross entropy."""
    lovasz: NotNegative = 0.0
    """Weight of the Lovasz-softmax loss."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not any((self.cross_entropy, self.dice, self.focal, self.lovasz)):
            raise ValueError("cross_entropy is 0, and so are all other losses; expected at least one above 0")
        return self


class OptimizerRecipe(Settings):
    """Optimizer, learning rate schedule and EMA."""

    name: Literal["sgd", "adamw", "adam", "rmsprop"] = "sgd"
    """Optimizer: SGD with momentum, AdamW, Adam or RMSprop. Only AdamW has decoupled weight decay; others use L2."""
    lr: NotNegative = 0.01
    """Learning rate at the start of the schedule."""
    momentum: Decay = 0.9
    """Momentum of SGD."""
    weight_decay: NotNegative = 2e-4
    """Weight decay, applied to convolution and linear weights only."""
    decay_backbone: bool = True
    """Apply weight decay to the backbone too; the authors' code applies it to the other layers only."""
    head_lr_factor: NotNegative = 1.0
    """Learning rate factor for all parameters outside the backbone."""
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Learning rate factor per backbone layer, counted back from the head: ViTs are often trained with 0.65 to 0.9."""
    schedule: Literal["poly", "cosine", "exponential"] = "poly"
    """Learning rate schedule: poly and cosine end at 0, exponential ends at lr * final_lr_factor."""
    power: NotNegative = 0.9
    """Power of the poly schedule."""
    final_lr_factor: Annotated[float, Field(gt=0, le=1)] = 0.01
    """Learning rate factor at the end of the exponential schedule; 0.995 per epoch is 0.0067 after 1,000 epochs."""
    warmup_steps: Annotated[int, Field(strict=True, ge=0)] = 0
    """Steps of linear warmup from 0."""
    clip_grad_norm: Annotated[float, Field(gt=0)] | None = None
    """Largest gradient norm; none does not clip."""
    ema: Decay | None = None
    """EMA decay of the weights, such as 0.999; the EMA weights are then evaluated and saved."""
    ema_batch_norm: Literal["averaged", "recomputed"] = "averaged"
    """Batch norm statistics of the EMA weights: averaged like the weights, or recomputed before each validation, with
    the EMA weights on the training batches of the first 100 steps."""

    @model_validator(mode="after")
    def _check_ema(self) -> Self:
        if self.ema_batch_norm == "recomputed" and self.ema is None:
            raise ValueError("ema_batch_norm is recomputed, but ema is none; set ema, such as 0.999")
        return self


class Recipe(Settings):
    """A complete training run."""

    init_from: str | None = None
    """Model to start from: a run, a model directory, camvid or hf://owner/name. Its architecture is adopted."""
    model: ModelRecipe = ModelRecipe()
    """Model of a training run."""
    data: DataRecipe
    """Dataset and augmentation; needs at least data.dataset."""
    loss: LossRecipe = LossRecipe()
    """Training losses."""
    optimizer: OptimizerRecipe = OptimizerRecipe()
    """Optimizer, learning rate schedule and EMA."""
    steps: Count = 40_000
    """Optimizer steps."""
    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training images; if set, steps is epochs * images / batch_size, rounded up."""
    batch_size: Count = 16
    """Images per step, over all devices and accumulation steps together."""
    accumulate: Count = 1
    """Gradient accumulation steps per optimizer step."""
    precision: Literal["32", "bf16", "16"] = "32"
    """Precision of autocast."""
    channels_last: bool = True
    """Use the channels_last memory format."""
    compile: bool = False
    """Compile the model with torch.compile."""
    cuda_graph: bool = False
    """Capture the training step in a CUDA graph and replay it; with several GPUs, only without sync_batch_norm."""
    batch_norm_momentum: Annotated[float, Field(gt=0, le=1)] | None = None
    """Momentum of batch norm statistics; none uses the model's own. The authors' CAR configurations use 0.0003."""
    fused_batch_norm: bool = False
    """Fuse batch normalization, shortcut addition and ReLU, and use a faster max pooling; on GPUs only."""
    sync_batch_norm: bool = True
    """With several GPUs, compute batch statistics over all of them; false computes them per GPU."""
    deterministic: bool = False
    """Use deterministic algorithms only: two runs give identical weights."""
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    """Random seed of initial weights, sample order and augmentation."""
    validate_every: Count = 1000
    """Steps between validations; the last step is always validated."""
    checkpoint_every: Count = 500
    """Steps between checkpoints."""
    early_stopping: Count | None = None
    """Number of validations without a better mean IoU after which training ends; none trains all steps."""
    loggers: tuple[LoggerName, ...] = ("tensorboard",)
    """Loggers of the metrics: tensorboard, csv, wandb, mlflow. metrics.jsonl is always written."""

    def starting_from(self, source: str) -> "Recipe":
        """Return a recipe that starts from another model and has no architecture settings of its own.

        Architecture settings that are set afterwards, for example by an option, override the settings of that model.
        """
        others = self.model.model_dump(mode="json", exclude_unset=True, exclude=set(Architecture.model_fields))
        return self.replace(init_from=source, model=ModelRecipe.read(others))

    def differences(self, other: "Recipe") -> dict[str, tuple[Any, Any]]:
        """Return the dotted keys whose values differ, each with the value here and in the other recipe."""
        pairs = {key: (attrgetter(key)(self), attrgetter(key)(other)) for key in flat_fields(Recipe)}
        return {key: (own, others) for key, (own, others) in pairs.items() if own != others}

    def values_to_change(self, options: Mapping[str, str]) -> dict[str, Any]:
        """Return the values of this recipe, like `as_dict`, without the values that the options replace."""
        recipe = self
        if options.get("init_from", "none") != "none":
            recipe = self.starting_from(options["init_from"])
        elif "model.pretrained" in options:
            recipe = self.replace(init_from=None)  # both are initial weights
        values = recipe.as_dict() | {"model": recipe.model.model_dump(mode="json", exclude_unset=True)}
        if "steps" in options:
            if "epochs" in options:
                raise CaasegError(
                    "--steps and --epochs are both set, but epochs determines steps; leave out one of them"
                )
            values["epochs"] = None  # the recipe's epochs would override steps
        return values

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.cuda_graph and (self.compile or self.accumulate > 1):
            raise ValueError("cuda_graph is true, but works neither with compile nor with accumulate above 1")
        recomputed = self.model.gradient_checkpointing
        if recomputed and (self.compile or self.cuda_graph or self.fused_batch_norm):
            raise ValueError(
                "model.gradient_checkpointing is true, but works with none of compile, cuda_graph and fused_batch_norm"
            )
        if self.batch_size % self.accumulate:
            raise ValueError(f"batch_size is {self.batch_size}; expected a multiple of accumulate, {self.accumulate}")
        return self
