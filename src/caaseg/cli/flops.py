"""`caaseg flops`: multiply-adds and parameters of a model."""

from caaseg.cli.arguments import check_writable
from caaseg.cli.terminal import console_for, write_json
from caaseg.config import Count, ModelConfig, OutputStride, ResNetVariant, Size
from caaseg.settings import spelled


def flops(
    *,
    head: str = "caa",
    backbone: str = "resnet101",
    output_stride: OutputStride = 16,
    size: Size = (513, 513),
    num_classes: Count = 59,
    aux: bool = False,
    decoder: bool = False,
    resnet_variant: ResNetVariant = "standard",
    gate_layers: Count = 5,
    gate_width: Count = 128,
    paper: bool = False,
    json: str | None = None,
) -> int:
    """Count the multiply-adds and parameters of a model for one image, without allocating its weights.

    Args:
        head: fcn, axial, axial_se, caa, self_attention, channelized_self_attention, danet, psp, deeplabv3,
            deeplabv3plus, upernet, segformer, nonlocal, ccnet, emanet, ann, encnet, ocr, or file.py:Class.
        backbone: a timm model; caaseg models lists them.
        output_stride: output stride of the backbone.
        size: height and width of the image.
        num_classes: number of classes.
        aux: count the auxiliary classifier too.
        decoder: count the simple decoder too.
        resnet_variant: standard ResNet, or the authors' (deep stem, strides in the last blocks).
        gate_layers: hidden layers of each channel gate.
        gate_width: units per hidden layer of a channel gate.
        paper: print the FLOPs of the paper's Tables 1 and 4 next to ours instead.
        json: file for the numbers; - is standard output.
    """
    from caaseg.analysis import flops as counting
    from caaseg.reports.tables import flops_table, paper_table

    check_writable(json=json)
    console = console_for(json)
    if paper:
        rows = counting.paper_rows()
        console.print(paper_table(rows))
        console.print(f"Ours: {counting.CONVENTION}.", highlight=False)
        if json is not None:
            records = [row._asdict() for row in rows]
            write_json({"convention": counting.CONVENTION, "size": [513, 513], "rows": records}, json, console)
        return 0
    height, width = size
    options = {
        "head": head,
        "backbone": backbone,
        "num_classes": num_classes,
        "output_stride": output_stride,
        "aux": aux,
        "decoder": decoder,
        "resnet_variant": resnet_variant,
        "gate_layers": gate_layers,
        "gate_width": gate_width,
    }
    config = ModelConfig.read(options, write=spelled)
    counted = counting.count(config, (height, width))
    console.print(f"{head} on {backbone}, stride {output_stride}, {height} x {width}", highlight=False)
    console.print(flops_table(counted))
    console.print(f"Convention: {counting.CONVENTION}.", highlight=False)
    if json is not None:
        content = {
            "head_name": head,
            "backbone_name": backbone,
            "output_stride": output_stride,
            "size": [height, width],
            "backbone": counted.backbone,
            "head": counted.head,
            "gates": counted.gates,
            "total": counted.total,
            "parameters": counted.parameters,
            "convention": counting.CONVENTION,
        }
        write_json(content, json, console)
    return 0
