"""Run directories with damaged or hostile checkpoints, recipes and logs, to be resumed."""

import shutil
from pathlib import Path
from typing import Any

import torch
from numpy.random import Generator

from tests.data.damage import mutated
from tests.hostile.material import HOSTILE_VALUES, choice, shared_data, shared_run, train_arguments
from tests.hostile.models import RunsCode, change_tensor
from tests.small_models import small_model

CHECKPOINT = Path("checkpoints/step-00000001.pt")


def case(rng: Generator, directory: Path) -> list[str]:
    shutil.copytree(shared_data(), directory / "data")
    run = directory / "out" / "run"
    shutil.copytree(shared_run(), run)
    kinds = [damage_checkpoint, change_state, change_state, other_content, damage_recipe, damage_log]
    choice(rng, kinds)(rng, run)
    checkpoint = run / CHECKPOINT
    if rng.random() < 0.5 and checkpoint.is_file():
        shutil.copy(checkpoint, directory / "mine.pt")
    resume = choice(rng, ["auto", str(CHECKPOINT), "mine.pt", "out/run/checkpoints/step-00000001.pt", "data"])
    return [*train_arguments(Path("data"), Path("out/run")), "--resume", resume]


def damage_checkpoint(rng: Generator, run: Path) -> None:
    path = run / CHECKPOINT
    path.write_bytes(mutated(path.read_bytes(), rng))


def change_state(rng: Generator, run: Path) -> None:
    state: dict[str, Any] = torch.load(run / CHECKPOINT, weights_only=True)
    key = choice(rng, list(state))
    if rng.random() < 0.4:
        if isinstance(state["model"], dict):
            change_tensor(rng, state["model"])
    elif rng.random() < 0.2:
        del state[key]
    else:
        state[key] = choice(rng, HOSTILE_VALUES)
    torch.save(state, run / CHECKPOINT)


def other_content(rng: Generator, run: Path) -> None:
    path = run / CHECKPOINT
    match int(rng.integers(5)):
        case 0:
            torch.save(small_model().state_dict(), path)
        case 1:
            torch.save(choice(rng, [[], {}, 3, None, {"step": 1}]), path)
        case 2:
            torch.save({"step": 1, "x": RunsCode(run / "executed")}, path)
        case 3:
            path.unlink()
            path.mkdir()
        case _:
            path.write_bytes(b"")


def damage_recipe(rng: Generator, run: Path) -> None:
    path = run / "recipe.yaml"
    path.write_bytes(mutated(path.read_bytes(), rng))


def damage_log(rng: Generator, run: Path) -> None:
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    bad = [
        b"\n",
        b"{}\n",
        b"3\n",
        b"{\n",
        b"\xff\n",
        b'{"step": "x"}\n',
        b'{"step": null}\n',
        b"[" * 3000 + b"\n",
        b"}\n",
    ]
    lines.insert(int(rng.integers(len(lines) + 1)), choice(rng, bad))
    path.write_bytes(b"".join(lines) if rng.random() < 0.7 else mutated(b"".join(lines), rng))
