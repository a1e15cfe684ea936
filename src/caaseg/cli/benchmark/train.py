"""`caaseg benchmark train`: the training command from its start."""

from pathlib import Path

from caaseg.cli.arguments import Device, Overrides, check_writable, device_of
from caaseg.cli.terminal import COMMAND_LINE, console_for, write_json
from caaseg.config import NotNegative


def benchmark_train(
    recipe: str,
    *,
    device: Device = "auto",
    seconds: NotNegative = 10.0,
    json: str | None = None,
    overrides: Overrides = (),
) -> int:
    """Measure the command caaseg train: images per second, time to the first step, and GPU utilization.

    The command runs in a process of its own, without validation, and is stopped after the measurement. A recipe with
    the dataset folder, but without --data.root, trains on synthetic images of 375 x 500 with 59 classes.

    Args:
        recipe: recipe (see caaseg recipes), or a YAML file.
        device: auto, cpu, cuda, cuda:N or mps; auto uses a GPU if there is one.
        seconds: approximate time of the measurement, after the start of the command.
        json: file for the numbers; - is standard output.
        overrides: options of the recipe.
    """
    from contextlib import ExitStack
    from shutil import which
    from tempfile import TemporaryDirectory

    from caaseg.benchmarks.provenance import provenance
    from caaseg.benchmarks.training import measure_training, write_folder
    from caaseg.recipes import load_recipe

    check_writable(json=json)
    loaded, torch_device, console = load_recipe(recipe, overrides), device_of(device), console_for(json)
    arguments = [recipe, *overrides, "--device", str(torch_device)]
    gpu = None
    if torch_device.type == "cuda" and which("nvidia-smi"):
        import torch

        gpu = f"GPU-{torch.cuda.get_device_properties(torch_device).uuid}"
    with ExitStack() as stack:
        if loaded.data.dataset == "folder" and loaded.data.root is None:
            root = Path(stack.enter_context(TemporaryDirectory()))
            write_folder(root, number=64, size=(375, 500), num_classes=59)
            arguments += ["--data.root", str(root)]
        speed = measure_training(arguments, loaded.batch_size, seconds=seconds, gpu=gpu)
    busy = "" if speed.gpu_utilization is None else f", {speed.gpu_utilization:.1%} GPU utilization"
    console.print(
        f"{recipe}: {speed.images_per_second:.4g} images per second over {speed.steps} steps, {speed.waiting:.1%} of "
        f"the time waiting for data{busy}; first step within {speed.first_step_s:.1f} s of the command",
        soft_wrap=True,
    )
    if json is not None:
        content = {**provenance(torch_device, COMMAND_LINE), "recipe": loaded.as_dict(), **speed._asdict()}
        write_json(content, json, console)
    return 0
