"""Model directories with damaged or hostile configs and weights."""

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import torch
from numpy.random import Generator
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.data.damage import mutated
from tests.hostile.material import HOSTILE_VALUES, choice, shared_model, write_data, write_image

DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64)


class RunsCode:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def case(rng: Generator, directory: Path) -> list[str]:
    model = directory / "model"
    shutil.copytree(shared_model(), model)
    choice(rng, [damage_config, change_config, damage_weights, change_weights, change_weights, other_weights])(
        rng, model
    )
    common = ["--device", "cpu"]
    if rng.random() < 0.1:
        write_data(directory / "data")
        dataset = ["--dataset", "folder", "--root", "data", "--workers", "0"]
        return ["evaluate", "model", *dataset, *common]
    write_image(directory / "photo.png")
    return ["predict", "model", "photo.png", "--out", "out", *common]


def damage_config(rng: Generator, model: Path) -> None:
    path = model / "config.json"
    path.write_bytes(mutated(path.read_bytes(), rng))


def change_config(rng: Generator, model: Path) -> None:
    path = model / "config.json"
    config = json.loads(path.read_text())
    for _ in range(int(rng.integers(1, 3))):
        key = choice(rng, [*config, "new"])
        if rng.random() < 0.2:
            config.pop(key, None)
        else:
            config[key] = choice(rng, HOSTILE_VALUES)
    path.write_text(json.dumps(config))


def damage_weights(rng: Generator, model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(mutated(path.read_bytes(), rng))


def change_weights(rng: Generator, model: Path) -> None:
    path = model / "model.safetensors"
    tensors = load_file(path)
    for _ in range(int(rng.integers(1, 3))):
        change_tensor(rng, tensors)
    save_file(tensors, path)


def change_tensor(rng: Generator, tensors: dict[str, Tensor]) -> None:
    name = choice(rng, list(tensors))
    tensor = tensors.pop(name)
    match int(rng.integers(6)):
        case 0:
            tensors[name] = tensor.to(choice(rng, DTYPES))
        case 1:
            largest = torch.finfo(tensor.dtype).max if tensor.is_floating_point() else 1
            tensors[name] = torch.full_like(tensor, choice(rng, [0, largest]))
        case 2:
            value = choice(rng, [float("nan"), float("inf")])
            tensors[name] = torch.full_like(tensor, value if tensor.is_floating_point() else 0)
        case 3:
            tensors[name] = tensor.flatten()[: int(rng.integers(0, tensor.numel() + 1))].clone()
        case 4:
            tensors[choice(rng, ["", "new", f"{name}.x", "module"])] = tensor
        case _:
            pass  # missing


def other_weights(rng: Generator, model: Path) -> None:
    """Replace the safetensors file by a PyTorch file, or by no file."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    path = model / "pytorch_model.bin"
    match int(rng.integers(8)):
        case 0:
            torch.save(tensors, path)
        case 1:
            torch.save(tensors, path)
            path.write_bytes(mutated(path.read_bytes(), rng))
        case 2:
            torch.save({name: torch.zeros(()).expand(t.shape) for name, t in tensors.items()}, path)
        case 3:
            torch.save({**tensors, "x": torch.zeros(1).expand(1 << 40)}, path)
        case 4:
            path.write_bytes(pickle.dumps(RunsCode(model / "executed")))
        case 5:
            torch.save(
                choice(rng, [[], {}, 3, {"a": 1}, {1: torch.zeros(1)}, {"state_dict": {}}, {"model": tensors}]), path
            )
        case 6:
            (model / "model.safetensors").mkdir()
        case _:
            (model / "model.safetensors").write_bytes(b"")
