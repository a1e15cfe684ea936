"""The paper's tables as data: the model of each row, and the number that the paper reports for it.

Numbers are mean IoU in %, from Huang et al., AAAI 2022, unless a table says otherwise. In the paper, a number in
parentheses is the standard deviation of 5 runs; the tables that compare with other methods report "the best results" of
an unknown number of runs, not means. The "test set" of PASCAL Context is the split called val.

Each row is a recipe: the base recipe of its dataset with the values that the table studies. `ROWS` lists them by name,
such as table1/caa_gate3x128.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from caaseg.benchmarks.mmseg_settings import mmseg_settings
from caaseg.models.heads import HEADS, resolve_head
from caaseg.reproduce.ideas import IDEAS, NOTES
from caaseg.reproduce.published import MMSEG_HEADS, NUMBERS, configuration

TableName = Literal[
    "table1",
    "table2",
    "table3",
    "table4",
    "table5",
    "state_of_the_art",
    "appendix",
    "result_figure",
    "car",
    "ade20k",
    "voc2012",
    "heads",
    "groups",
    "camvid_ideas",
]
Protocol = Literal["single", "multi"]
"""Evaluation at a single scale, or multi-scale with flips."""

SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)
"""Scales of the authors' code, each also flipped; the paper does not report them."""

BASES = {
    "pascal_context": "pascal_context/caa_resnet101_s16",
    "coco_stuff_10k": "coco_stuff_10k/caa_aux_resnet101_s8",
    "coco_stuff_164k": "coco_stuff_164k/caa_efficientnet_b5_s8",
    "ade20k": "ade20k/caa_aux_resnet101_s8",
    "voc2012": "voc2012/caa_aux_resnet101_s8",
    "cityscapes": "cityscapes/caa_aux_resnet101_s8",
    "camvid": "camvid/caa_resnet50",
    "folder": "folder/caa_resnet18",
    "scenes": "scenes/caa_resnet18",
}
"""The base recipe of each dataset."""


@dataclass(frozen=True)
class Number:
    """A number of the paper in %, with its standard deviation if reported."""

    mean: float
    std: float | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of a table: a model that is trained, and the paper's numbers for it."""

    name: str
    label: str | None
    """Label of the row; None for the title of its head."""
    dataset: str | None
    """The paper's dataset; None if the row is not in the paper."""
    model: Mapping[str, Any]
    """The setting that the table studies, as changes of the recipe's model; used with every dataset."""
    options: tuple[str, ...] = ()
    """Settings outside the model that the table studies, as command-line options; used with every dataset."""
    paper_model: Mapping[str, Any] = field(default_factory=dict)
    """Further changes of the base recipe on the paper's dataset."""
    paper_label: str | None = None
    """Text that is added to the label on the paper's dataset: settings of the recipe there, such as the backbone."""
    paper_base: str | None = None
    """Base recipe on the paper's dataset; None for the one in `BASES`."""
    paper_options: tuple[str, ...] = ()
    """Further options of the recipe on the paper's dataset, outside its model."""
    baseline: str | None = None
    """Name of the row to compare with, seed by seed."""
    paper: Mapping[Protocol, Number] = field(default_factory=dict)
    """The paper's numbers."""
    source: str | None = None
    """Where the numbers are published, if not in the paper."""
    note: str | None = None
    """Detail that the paper does not state about this row, and what is trained here."""

    def title(self, *, own_recipe: bool) -> str:
        """Return the label of the row, for its own recipe or for the recipe of another dataset."""
        label = self.label or resolve_head(self.model["head"]).title
        return f"{label}, {self.paper_label}" if own_recipe and self.paper_label else label


def options_of(model: Mapping[str, Any]) -> list[str]:
    """Return changes of a recipe's model as command-line options."""
    return [f"--model.{key}={json.dumps(value)}" for key, value in model.items()]


@dataclass(frozen=True)
class Quoted:
    """A number that the paper quotes for another method; it is neither trained nor checked here."""

    method: str
    dataset: str
    mean: float
    source: str = "quoted by the paper"


PAPER_SEEDS = 5
"""Number of runs per row, of which the paper reports mean and standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the paper, or one of the same form."""

    title: str
    rows: tuple[Row, ...]
    publisher: str = "paper"
    """Heading of the published numbers."""
    seeds: int = PAPER_SEEDS
    """Default number of seeds with the rows' own recipes."""
    recipe: str | None = None
    """Default recipe of all rows, for a table about one recipe."""
    quoted: tuple[Quoted, ...] = ()
    notes: tuple[str, ...] = ()
    """Explanations, and notes on errors in the paper's text."""


def _single(mean: float, std: float | None = None) -> dict[Protocol, Number]:
    return {"single": Number(mean, std)}


def _multi(mean: float, std: float | None = None) -> dict[Protocol, Number]:
    return {"multi": Number(mean, std)}


AXIAL = Row(
    name="axial",
    label="axial attention",
    dataset="pascal_context",
    model={"head": "axial"},
    paper=_single(50.27, 0.2),
)
CAA = Row(
    name="caa",
    label="channelized axial attention",
    dataset="pascal_context",
    model={"head": "caa"},
    baseline="axial",
    paper=_single(51.06, 0.2),
)


def _gate(layers: int, width: int, mean: float, std: float) -> Row:
    return Row(
        name=f"caa_gate{layers}x{width}",
        label=f"channelized, {layers} layer{'s' * (layers > 1)} of {width}",
        dataset="pascal_context",
        model={"head": "caa", "gate_layers": layers, "gate_width": width},
        baseline="axial",
        paper=_single(mean, std),
    )


def _strategy(
    name: str, label: str, head: str, aux: bool, stride: int, paper: Mapping[Protocol, Number], baseline: str | None
) -> Row:
    return Row(
        name=f"{name}_s{stride}",
        label=f"{label}, stride {stride}",
        dataset="pascal_context",
        model={"head": head, "aux": aux, "output_stride": stride},
        baseline=baseline,
        paper=paper,
    )


def _both(single: tuple[float, float], multi: tuple[float, float]) -> dict[Protocol, Number]:
    return {"single": Number(*single), "multi": Number(*multi)}


def _backbone(
    name: str, label: str, timm_name: str, head: str, stride: int, mean: float, baseline: str | None = None
) -> Row:
    # Only ResNets have a multi-grid; how the authors dilate their Xception is not known.
    grid = {} if name.startswith("resnet") else {"multi_grid": None}
    settings: dict[str, dict[str, Any]] = {"efficientnet_b7": {"top_features": True}, "xception65": {"dilation": None}}
    return Row(
        name=f"{head}_{name}_s{stride}",
        label=f"{label}, {'channelized' if head == 'caa' else 'axial attention'}, stride {stride}",
        dataset="pascal_context",
        model={"head": head, "backbone": timm_name, "output_stride": stride, **grid},
        paper_model=settings.get(name, {}),
        baseline=baseline,
        paper=_single(mean),
        note=EVALUATION_STRIDE if stride == 8 else None,
    )


def _against_danet(dataset: str, title: str, danet: float, caa: Mapping[int, float], *, several: bool) -> list[Row]:
    """DANet and CAA on one of the datasets of the comparison with other methods.

    The auxiliary losses of DANet are those of its two branches; it has no auxiliary loss on the backbone.
    """
    first = Row(
        name=f"danet_aux_s8_{dataset}",
        label=f"{title}: DANet",
        dataset=dataset,
        model={"head": "danet", "aux": False, "output_stride": 8},
        paper=_multi(danet),
    )
    others = [
        Row(
            name=f"caa_aux_s{stride}_{dataset}",
            label=f"{title}: CAA{f', stride {stride}' if several else ''}",
            dataset=dataset,
            model={"head": "caa", "aux": True, "output_stride": stride},
            baseline=first.name,
            paper=_multi(mean),
        )
        for stride, mean in caa.items()
    ]
    return [first, *others]


def _result_figure(stride: int) -> list[Row]:
    """The three models of the result figure on PASCAL Context; DANet and CAA as in Table 4."""
    fcn = f"fcn_s{stride}"
    return [
        _strategy("fcn", "FCN", "fcn", False, stride, {}, None),
        _strategy("danet_aux", "DANet with auxiliary losses", "danet", False, stride, {}, fcn),
        _strategy("caa", "CAA", "caa", False, stride, {}, fcn),
    ]


def _car(
    name: str,
    label: str,
    model: Mapping[str, Any],
    paper: Mapping[Protocol, Number],
    *,
    baseline: str | None = None,
    paper_label: str = "ResNet-50",
    paper_model: Mapping[str, Any] | None = None,
    paper_options: tuple[str, ...] = (),
) -> Row:
    """A row of the table of class-aware regularization (CAR). Only rows with a baseline use CAR."""
    return Row(
        name=name,
        label=label,
        dataset="pascal_context",
        model={**model, "car": baseline is not None},
        paper_model=paper_model or {},
        baseline=baseline,
        paper=paper,
        paper_label=paper_label,
        paper_base="pascal_context/fcn_resnet50_s8_car",
        paper_options=paper_options,
    )


OWN_LOSSES = {
    "danet": ("danet_branches", "DANet with its branch losses", "--loss.branch_weight=0"),
    "ocr": ("ocr_branches", "OCRNet with its region loss", "--loss.branch_weight=0"),
    "encnet": ("encnet_presence", "EncNet with its presence loss", "--loss.presence_weight=0"),
}
"""Heads with additional losses: name and label of the row with these losses, and option that turns them off."""

OWN_HEAD = "A head from a file is trained with all of its losses; other rows have no additional losses."

DETACHED = (
    "The channel branch of axial_se has a classifier whose input is detached. Its loss trains only this classifier "
    "(but counts for clip_grad_norm), so it is not additional supervision."
)


def _head(head: str) -> Row:
    """Return the row of a head, with the same supervision for every head."""
    without = OWN_LOSSES.get(head)
    note = DETACHED if head == "axial_se" else None
    if without is not None:
        note = f"Trained without its additional losses ({without[2]}), like the other heads; {without[0]} has them."
    return Row(
        name=head,
        label=None,
        dataset=None,
        model={"head": head},
        options=() if without is None else (without[2],),
        baseline=None if head == "axial" else "axial",
        note=note,
    )


def _with_own_losses(head: str, name: str, label: str) -> Row:
    return Row(
        name=name,
        label=label,
        dataset=None,
        model={"head": head},
        baseline="axial",
        note=f"{name} has more supervision than its baseline: a difference may come from its additional losses.",
    )


CONVNEXT = {
    "backbone": "convnext_large.fb_in22k_ft_in1k",
    "neck": "jpu",
    "multi_grid": None,
    "dilation": None,
}
"""ConvNeXt-L with JPU, instead of the ResNet-50 of the base recipe."""


def _mmseg(dataset: str, schedules: tuple[int, ...]) -> list[Row]:
    """The heads of mmsegmentation with ResNet-101 and its settings, and CAA, for schedules in thousands of steps."""
    return [_mmseg_row(head, dataset, steps) for steps in schedules for head in (*MMSEG_HEADS, "caa")]


def _mmseg_row(head: str, dataset: str, thousand_steps: int) -> Row:
    scores = NUMBERS[dataset].get(head, {}).get(thousand_steps)
    settings = mmseg_settings(head) if head in MMSEG_HEADS else {}
    weights = ("--loss.branch_weight=0.4",) if head == "ocr" else ()  # of the regions
    return Row(
        name=f"{head}_{thousand_steps}k",
        label=MMSEG_HEADS[head].title if head in MMSEG_HEADS else "CAA",
        dataset=dataset,
        model={"head": head},
        paper_model=settings,
        paper_label=f"{thousand_steps},000 steps",
        paper_options=(f"--steps={thousand_steps}000", *weights),
        baseline=None if head == "fcn" else f"fcn_{thousand_steps}k",
        paper={} if scores is None else {"single": Number(scores.single), "multi": Number(scores.multi)},
        source=None if scores is None else configuration(head, dataset, thousand_steps),
    )


ADAMW = (
    *("--optimizer.name=adamw", "--optimizer.lr=0.0001", "--optimizer.weight_decay=0.05"),
    *("--optimizer.warmup_steps=1500", "--steps=160000"),
)
"""Optimizer of the rows of ADE20K with larger backbones: that of mmsegmentation's ConvNeXt."""
DINOV2 = {"backbone": "vit_base_patch14_dinov2.lvd142m", "neck": "sfp", "drop_path": 0.1}
"""ViT-B of DINOv2 with a simple feature pyramid."""


def _large(
    backbone: str, label: str, model: Mapping[str, Any], *, car: bool = False, options: tuple[str, ...] = ()
) -> Row:
    """A row of ADE20K: CAA with a larger backbone and a neck, whose output the auxiliary classifier reads."""
    return Row(
        name=f"caa_{'car_' if car else ''}{backbone}_160k",
        label="CAA, CAR" if car else "CAA",
        dataset="ade20k",
        model={"head": "caa", "car": car},
        paper_model={**model, "aux_stage": None},
        paper_label=label,
        paper_options=(*ADAMW, *options),
        baseline=f"caa_{backbone}_160k" if car else None,
        note=OWN_SETTINGS,
    )


def _quoted(dataset: str, numbers: Mapping[str, float]) -> list[Quoted]:
    return [Quoted(method, dataset, mean) for method, mean in numbers.items()]


ABLATION = (
    "The paper's numbers are for PASCAL Context (59 classes) with ResNet-101 pretrained on ImageNet, output stride 16, "
    "single scale, 40,000 steps; means and standard deviations of 5 runs."
)
BEST_RESULTS = (
    "The paper's numbers here are its best results, not means over runs, with multi-scale and flip; it does not "
    "report the scales, so ours are those of the authors' code."
)

EVALUATION_STRIDE = (
    "The stride of this table is that of the evaluation. The paper does not state whether this model was trained at "
    "stride 8 or 16; ours is trained at 8."
)
APPENDIX_AUX = "The paper does not state whether this model has the auxiliary loss; ours does not."
SCHEDULE_164K = (
    "The paper does not state the schedule of COCO-Stuff 164K; ours is that of the other datasets, 40,000 steps of 16 "
    "images."
)

OWN_SETTINGS = "Neither a number nor settings are published for this model; our settings are those of similar models."
MMSEG_NOTES = (
    "The published numbers are those of mmsegmentation 1.2.2 (configs/*/metafile.yaml), one run each; the sources are "
    "its configurations. mmsegmentation publishes no numbers for the other heads with ResNet-101 on this dataset.",
    "The recipe has mmsegmentation's ResNet (V1c) with ImageNet-1k weights, and its crops, batch size, optimizer, "
    "auxiliary loss and loss weights. These settings differ: our learning rate ends at 0 instead of 0.0001; weight "
    "decay does not apply to batch normalization and biases; contrast, saturation and hue are changed in every image "
    "instead of in half of them; crops with one class in more than 75% of their pixels are used; images with a short "
    "side below 512 are not enlarged to 512, neither for training nor for evaluation.",
)

TABLES: dict[str, Table] = {
    "table1": Table(
        title="Table 1: depth and width of the channel gates",
        rows=(
            AXIAL,
            _gate(1, 128, 50.75, 0.2),
            _gate(3, 128, 50.85, 0.2),
            _gate(5, 128, 51.06, 0.2),
            _gate(7, 128, 50.40, 0.3),
            _gate(5, 64, 50.12, 0.2),
            _gate(5, 256, 50.35, 0.4),
            Row(
                name="caa_gate5x128_relu",
                label="channelized, 5 layers of 128, ReLU",
                dataset="pascal_context",
                model={"head": "caa", "gate_layers": 5, "gate_width": 128, "gate_activation": "relu"},
                baseline="axial",
            ),
        ),
        notes=(
            ABLATION,
            "The last row is not in the table: the text says that leaky ReLU is more effective, without a number.",
            "The paper says of this table that channelization improves the baseline for every depth and width, but its "
            "5 x 64 (50.12) is below the baseline (50.27). caaseg flops --paper compares the FLOPs.",
        ),
    ),
    "table2": Table(
        title="Table 2: axial attention, with squeeze-and-excitation, with channelization",
        rows=(
            AXIAL,
            Row(
                name="axial_se",
                label="squeeze-and-excitation, then axial attention",
                dataset="pascal_context",
                model={"head": "axial_se"},
                baseline="axial",
                paper=_single(50.37, 0.2),
            ),
            CAA,
        ),
        notes=(
            ABLATION,
            'The paper calls the second row "Axial Attention + SE" and draws channel attention first, as we do.',
        ),
    ),
    "table3": Table(
        title="Table 3: channelization of axial attention and of self-attention",
        rows=(
            replace(AXIAL, paper=_single(50.27)),
            replace(CAA, paper=_single(51.06)),
            Row(
                name="self_attention",
                label="self-attention",
                dataset="pascal_context",
                model={"head": "self_attention"},
                paper=_single(50.42),
            ),
            Row(
                name="channelized_self_attention",
                label="channelized self-attention",
                dataset="pascal_context",
                model={"head": "channelized_self_attention"},
                baseline="self_attention",
                paper=_single(51.09),
            ),
        ),
        notes=(ABLATION, "This table reports no standard deviations; Table 1 has 0.2 for the first two rows."),
    ),
    "table4": Table(
        title="Table 4: output stride, auxiliary loss, multi-scale and flip",
        rows=(
            _strategy("danet_aux", "DANet with auxiliary losses", "danet", False, 8, _multi(52.60), "axial_s8"),
            _strategy("axial", "axial attention", "axial", False, 16, _both((50.27, 0.2), (52.01, 0.2)), None),
            _strategy("axial", "axial attention", "axial", False, 8, _both((51.24, 0.2), (52.51, 0.2)), None),
            _strategy("caa", "CAA", "caa", False, 16, _both((51.06, 0.2), (53.09, 0.3)), "axial_s16"),
            _strategy("caa", "CAA", "caa", False, 8, _both((52.73, 0.1), (54.05, 0.1)), "axial_s8"),
            _strategy(
                "caa_aux", "CAA with auxiliary loss", "caa", True, 16, _both((51.80, 0.2), (53.52, 0.2)), "axial_s16"
            ),
            _strategy(
                "caa_aux", "CAA with auxiliary loss", "caa", True, 8, _both((53.48, 0.3), (54.65, 0.4)), "axial_s8"
            ),
        ),
        notes=(
            "The paper's numbers are for PASCAL Context (59 classes) with ResNet-101 pretrained on ImageNet, 40,000 "
            "steps; means and standard deviations of 5 runs, DANet's quoted from its authors.",
            'The paper writes "auxiliary loss during inference", but it is a training loss. It does not report '
            "its scales: ours are those of the authors' code. caaseg flops --paper compares the FLOPs.",
        ),
    ),
    "table5": Table(
        title="Table 5: other backbones",
        rows=(
            _backbone("resnet50", "ResNet-50", "resnet50.tv_in1k", "axial", 16, 49.73),
            _backbone("resnet50", "ResNet-50", "resnet50.tv_in1k", "caa", 16, 50.23, "axial_resnet50_s16"),
            _backbone("xception65", "Xception65", "xception65.tf_in1k", "axial", 16, 52.42),
            _backbone("xception65", "Xception65", "xception65.tf_in1k", "caa", 16, 52.65, "axial_xception65_s16"),
            _backbone("efficientnet_b7", "EfficientNet-B7", "tf_efficientnet_b7.ra_in1k", "axial", 16, 57.24),
            _backbone(
                *("efficientnet_b7", "EfficientNet-B7", "tf_efficientnet_b7.ra_in1k", "caa"),
                *(16, 57.93, "axial_efficientnet_b7_s16"),
            ),
            _backbone(
                *("efficientnet_b7", "EfficientNet-B7", "tf_efficientnet_b7.ra_in1k", "caa"),
                *(8, 58.40, "axial_efficientnet_b7_s16"),
            ),
        ),
        notes=(
            "The paper's numbers are for PASCAL Context (59 classes), single scale, 40,000 steps, without standard "
            "deviations. Its last row has another output stride than the axial attention above it.",
        ),
    ),
    "state_of_the_art": Table(
        title="The comparison with other methods: ResNet-101, naive upsampling",
        rows=(
            *_against_danet("pascal_context", "PASCAL Context", 52.6, {16: 53.7, 8: 55.0}, several=True),
            *_against_danet("coco_stuff_10k", "COCO-Stuff 10K", 39.7, {8: 41.2}, several=False),
            *_against_danet("cityscapes", "Cityscapes", 81.5, {8: 82.6}, several=False),
        ),
        quoted=(
            *_quoted(
                "pascal_context",
                {"ENCNet": 51.7, "ANNet": 52.8, "EMANet": 53.1, "SPYGR": 52.8, "CPN": 53.9, "CFNet": 54.0},
            ),
            *_quoted("coco_stuff_10k", {"DSSPN": 38.9, "SVCNet": 39.6, "EMANet": 39.9, "SPYGR": 39.9, "OCR": 39.5}),
            *_quoted(
                "cityscapes",
                {"CFNet": 79.6, "ANNet": 81.3, "CCNet": 81.4, "CPN": 81.3, "SPYGR": 81.6, "OCR": 81.8},
            ),
        ),
        notes=(
            BEST_RESULTS,
            "DANet's numbers are quoted by the paper from DANet's authors.",
            "COCO-Stuff 10K has 171 labeled classes; the paper says 172, with the unlabeled one. The paper's numbers "
            "for Cityscapes are on the test set, which only the evaluation server can score: ours are on val.",
        ),
    ),
    "appendix": Table(
        title="The appendix: stronger backbones, the simple decoder",
        rows=(
            Row(
                name="caa_efficientnet_b7_pascal_context",
                label="PASCAL Context: CAA, EfficientNet-B7",
                dataset="pascal_context",
                model={"head": "caa", "backbone": "tf_efficientnet_b7.ra_in1k", "multi_grid": None, "decoder": False},
                paper_model={"output_stride": 8, "top_features": True},
                paper=_multi(60.12),
                note=APPENDIX_AUX,
            ),
            Row(
                name="caa_decoder_efficientnet_b7_pascal_context",
                label="PASCAL Context: CAA, EfficientNet-B7, simple decoder",
                dataset="pascal_context",
                model={"head": "caa", "backbone": "tf_efficientnet_b7.ra_in1k", "multi_grid": None, "decoder": True},
                paper_model={"output_stride": 8, "top_features": True},
                baseline="caa_efficientnet_b7_pascal_context",
                paper=_multi(60.50),
                note=APPENDIX_AUX,
            ),
            Row(
                name="caa_efficientnet_b7_coco_stuff_10k",
                label="COCO-Stuff 10K: CAA, EfficientNet-B7",
                dataset="coco_stuff_10k",
                model={"head": "caa", "backbone": "tf_efficientnet_b7.ra_in1k", "multi_grid": None, "decoder": False},
                paper_model={"aux": False, "top_features": True},
                paper=_multi(45.4),
                note=APPENDIX_AUX,
            ),
            Row(
                name="caa_efficientnet_b5_coco_stuff_164k",
                label="COCO-Stuff 164K: CAA, EfficientNet-B5",
                dataset="coco_stuff_164k",
                model={"head": "caa", "backbone": "tf_efficientnet_b5.ra_in1k", "multi_grid": None, "decoder": False},
                paper=_multi(47.30),
                note=f"{APPENDIX_AUX} {SCHEDULE_164K}",
            ),
        ),
        quoted=(
            *_quoted(
                "pascal_context",
                {
                    "CTNet + JPU": 55.5,
                    "SETR-MLA": 55.83,
                    "HRNetV2 + OCR": 56.2,
                    "ResNeSt-269 + DeepLab V3+": 58.9,
                    "HRNetV2 + OCR + RMI": 59.6,
                    "DPT-Hybrid": 60.46,
                },
            ),
            *_quoted("coco_stuff_10k", {"HRNetV2 + OCR": 40.5, "DRAN": 41.2, "HRNetV2 + OCR + RMI": 45.2}),
            *_quoted(
                "coco_stuff_164k",
                {"ResNet-50 + DeepLabV3+": 38.4, "HRNetV2 + OCR": 42.3, "SETR": 45.8, "Segformer-B5": 46.7},
            ),
        ),
        notes=(
            BEST_RESULTS,
            "The paper itself says that the comparison is unfair: settings and backbones differ. It does not state "
            "the output stride; we use 8. COCO-Stuff has 171 labeled classes; the paper says 172.",
        ),
    ),
    "result_figure": Table(
        title="The result figures: FCN, DANet and CAA",
        rows=(
            *_result_figure(16),
            *_result_figure(8),
            Row(
                name="fcn_s8_coco_stuff_10k",
                label="COCO-Stuff 10K: FCN",
                dataset="coco_stuff_10k",
                model={"head": "fcn", "aux": False, "output_stride": 8},
            ),
            *(
                replace(row, baseline="fcn_s8_coco_stuff_10k", paper={})
                for row in _against_danet("coco_stuff_10k", "COCO-Stuff 10K", 39.7, {8: 41.2}, several=False)
            ),
        ),
        notes=(
            "The paper's figures have no numbers. They are drawn by caaseg compare RUN RUN RUN --images NAMES, with "
            "the runs of FCN, DANet and CAA. The names of their images are not published.",
            "The paper states output stride 8 for COCO-Stuff 10K and none for PASCAL Context: both are trained. It "
            "does not state whether CAA has the auxiliary loss; on PASCAL Context ours does not. Some rows have the "
            "names and recipes of rows of Table 4 and of the comparison with other methods: with the same --out they "
            "are not trained again.",
        ),
    ),
    "car": Table(
        title="Class-aware regularization (CAR, ECCV 2022): heads without and with it",
        rows=(
            _car("fcn", "FCN", {"head": "fcn"}, _single(47.72)),
            _car("fcn_car", "FCN, CAR", {"head": "fcn"}, _single(48.40), baseline="fcn"),
            _car("self_attention", "self-attention", {"head": "self_attention"}, _single(48.32)),
            _car(
                *("self_attention_car", "self-attention, CAR", {"head": "self_attention"}, _single(50.50)),
                baseline="self_attention",
            ),
            _car(
                *("caa", "CAA", {"head": "caa"}),
                {"single": Number(60.48), "multi": Number(61.80)},
                paper_label="ConvNeXt-L + JPU",
                paper_model=CONVNEXT,
            ),
            _car(
                *("caa_car", "CAA, CAR", {"head": "caa"}),
                {"single": Number(61.40), "multi": Number(62.69)},
                baseline="caa",
                paper_label="ConvNeXt-L + JPU",
                paper_model=CONVNEXT,
            ),
            _car(
                *("caa_aux_car", "CAA, CAR, auxiliary loss", {"head": "caa", "aux": True}),
                {"single": Number(62.97), "multi": Number(64.12)},
                baseline="caa",
                paper_label="ConvNeXt-L + JPU, Adam",
                paper_model=CONVNEXT,
                paper_options=("--steps=40000", "--optimizer.name=adam", "--optimizer.lr=0.0001"),
            ),
        ),
        notes=(
            "The numbers are those of the CAR paper, by the same authors: PASCAL Context, 59 classes, output stride 8, "
            "30,000 steps. The row caa_aux_car has 40,000 steps of Adam. The paper does not state the learning rate; "
            "ours is 0.0001.",
            "The authors' FCN has a 1x1 convolution to 256 channels before its classifier. Their self-attention head "
            "has a shortcut and a 3x3 convolution, and no image-level branch. Ours are the heads of the other tables.",
            "The recipe for PASCAL Context has the authors' batch norm momentum, loss average, weight decay and "
            "padding of images.",
        ),
    ),
    "ade20k": Table(
        title="ADE20K: heads with ResNet-101 in the settings of mmsegmentation, and CAA with larger backbones",
        publisher="mmsegmentation",
        seeds=1,
        rows=(
            *_mmseg("ade20k", (80, 160)),
            _large("convnext_large", "ConvNeXt-L + JPU", CONVNEXT),
            _large("convnext_large", "ConvNeXt-L + JPU", CONVNEXT, car=True),
            _large(
                *("dinov2_base", "DINOv2 ViT-B/14 + simple feature pyramid", DINOV2),
                options=("--data.crop=518 518", "--optimizer.layer_decay=0.9"),
            ),
        ),
        quoted=(
            Quoted("OCRNet, HRNet-W48, single scale", "ade20k", 43.25, "ocrnet_hr48_4xb4-160k_ade20k-512x512"),
            Quoted("SegFormer, MiT-B5, single scale", "ade20k", 49.13, "segformer_mit-b5_8xb2-160k_ade20k-512x512"),
            Quoted(
                *("UPerNet, ConvNeXt-L, crops of 640, single scale", "ade20k", 53.16),
                "convnext-large_upernet_8xb2-amp-160k_ade20k-640x640",
            ),
            Quoted("linear, DINOv2 ViT-B/14, several scales", "ade20k", 51.3, "model card of facebookresearch/dinov2"),
        ),
        notes=(
            *MMSEG_NOTES,
            "The metafile of deeplabv3plus gives its two models the same name; the README.md next to it has both.",
        ),
    ),
    "voc2012": Table(
        title="PASCAL VOC 2012 with SBD: heads with ResNet-101 in the settings of mmsegmentation",
        publisher="mmsegmentation",
        seeds=1,
        rows=tuple(_mmseg("voc2012", (20, 40))),
        quoted=(
            Quoted("OCRNet, HRNet-W48, single scale", "voc2012", 77.14, "ocrnet_hr48_4xb4-40k_voc12aug-512x512"),
            Quoted("EMANet, ResNet-101, single scale", "voc2012", 80.05, "README of its authors, XiaLiPKU/EMANet"),
        ),
        notes=MMSEG_NOTES,
    ),
    "heads": Table(
        title="All heads under one recipe",
        rows=(
            *(_head(head) for head in HEADS),
            Row(
                name="caa_car",
                label="channelized axial attention, CAR",
                dataset=None,
                model={"head": "caa", "car": True},
                baseline="caa",
                note="CAR adds three losses on the features before the classifier, so the row is compared with caa.",
            ),
            *(_with_own_losses(head, name, label) for head, (name, label, _) in OWN_LOSSES.items()),
        ),
        notes=(
            "This is not a table of the paper: it trains every head with one recipe on one dataset. All heads have the "
            "same supervision: the loss of the prediction and, if the recipe has one, the auxiliary loss on the "
            "backbone. Heads with additional losses have a second row with these losses.",
        ),
    ),
    "camvid_ideas": Table(
        title="CamVid from random weights: ideas for a better recipe",
        rows=(
            Row(name="base", label="no change", dataset=None, model={"head": "caa"}),
            *(
                Row(
                    name=idea.name,
                    label=idea.label,
                    dataset=None,
                    model={"head": "caa", **idea.model},
                    options=idea.options,
                    baseline="base",
                )
                for idea in IDEAS
            ),
        ),
        recipe="camvid/caa_resnet18_long",
        notes=NOTES,
    ),
}

ROWS = {
    f"{name}/{row.name}": (
        row.paper_base or BASES[row.dataset],
        [*options_of({**row.model, **row.paper_model}), *row.options, *row.paper_options],
    )
    for name, table in TABLES.items()
    for row in table.rows
    if row.dataset is not None
}
"""Base recipe and options of each row of the paper, by its name."""
