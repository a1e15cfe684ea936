"""`caaseg convert`: turn the authors' TensorFlow weights into a model."""

from pathlib import Path

from caaseg.cli.arguments import check_writable
from caaseg.cli.terminal import console_for, write_json
from caaseg.config import OutputStride


def convert(checkpoint: Path, *, out: Path, output_stride: OutputStride = 16, json: str | None = None) -> int:
    """Convert the authors' TensorFlow weights, without TensorFlow.

    Reads checkpoints of CAA models of both repositories (edwardyehuang/CAA and CAR) with a ResNet or EfficientNet
    backbone, and .h5 files of such backbones, which need h5py. Lists the variables that the result does not contain.

    Args:
        checkpoint: a checkpoint (NAME.index or NAME), a directory with one checkpoint, or an .h5 file of backbone
            weights.
        out: directory of the model; for backbone weights a .safetensors file, for --model.pretrained.
        output_stride: output stride of the model; the checkpoint does not contain it.
        json: file for the lists of variables; - is standard output.
    """
    from caaseg.models.convert import convert as convert_weights

    check_writable([checkpoint], json=json)
    result = convert_weights(checkpoint, out, output_stride=output_stride)
    console = console_for(json)
    lines = [f"{len(result.used)} variables converted"]
    if result.training_state:
        lines.append(f"{len(result.training_state)} variables of the optimizer and the checkpoint were skipped")
    if result.unknown:
        listed = ", ".join(result.unknown)
        lines.append(f"{len(result.unknown)} variables are not in the model and were skipped: {listed}")
    if result.feature_channels is not None:
        lines.append(
            "the checkpoint contains a head without a backbone: the model takes feature maps, not images; load it "
            f"with load_model({str(out)!r}, backbone=caaseg.models.backbones.FeatureInput({result.feature_channels}))"
        )
    lines.append(f"{'backbone weights' if result.config is None else 'model'}: {out}")
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    if json is not None:
        lists = {name: getattr(result, name) for name in ("feature_channels", "used", "training_state", "unknown")}
        write_json({"checkpoint": str(checkpoint), "out": str(out), **lists}, json, console)
    return 0
