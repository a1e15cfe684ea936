"""Importing the package and showing help is fast."""

import json
import resource
import subprocess
import sys

import pytest

from tests.commands_without_torch import HEAVY

COMMANDS = [
    ("--help", 0),
    ("benchmark --help", 0),
    ("benchmark attention --help", 0),
    ("benchmark loader --help", 0),
    ("data show --help", 0),
    ("evaluate --help", 0),
    ("app --help", 0),
    ("conflicts --help", 0),
    ("compare --help", 0),
    ("data --help", 0),
    ("data check --help", 0),
    ("train --help", 0),
    ("train folder/caa_resnet18 --help", 0),
    ("train table1/caa_gate3x128 --help", 0),
    ("demo --help", 0),
    ("recipes --help", 0),
    ("recipes", 0),
    ("models", 0),
    ("models --help", 0),
    ("reproduce --help", 0),
    ("benchmark attention --devise cpu", 2),
    ("app my-model --prot 80", 2),
    ("evaluate my-model", 2),
    ("compare my-model", 2),
    ("data prepare camvid", 2),
    ("reproduce table2", 2),
    ("reproduce table2 --out x --seads 2", 2),
    ("train scenes/caa_resnet18 --devise cpu", 2),
    ("train scenes/caa_resnet18 --data.flip 7", 2),
    ("train scenes/caa_resnet18 --model.head cac", 2),
    ("nothing", 2),
    ("", 2),
]


def imported_by(*arguments: str) -> tuple[int, set[str], str]:
    """Run a new interpreter; return its exit code, the heavy packages it imported, and its standard output."""
    command = [sys.executable, "-X", "importtime", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in result.stderr.splitlines() if line.startswith("import time")]
    names = {line.rpartition("|")[2].strip() for line in lines}
    return result.returncode, names & set(HEAVY), result.stdout


def test_importing_the_package_imports_nothing_heavy_and_prints_nothing() -> None:
    assert imported_by("-c", "import caaseg") == (0, set(), "")


def test_importing_the_attention_imports_torch_but_no_other_heavy_package() -> None:
    assert imported_by("-c", "import caaseg.attention") == (0, {"torch"}, "")


def test_help_and_usage_errors_import_no_torch_and_take_less_than_a_second() -> None:
    """All commands run in one process, to save time."""
    lines = [line for line, _ in COMMANDS]
    probe = [sys.executable, "-m", "tests.commands_without_torch", *lines]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(probe, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    found = json.loads(result.stdout)
    start_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime - sum(entry[2] for entry in found)
    for (line, code), (found_code, imported, seconds) in zip(COMMANDS, found, strict=True):
        assert (found_code, imported) == (code, []), line
        assert start_s + seconds < 1, line


@pytest.mark.slow
@pytest.mark.parametrize(("line", "code"), COMMANDS)
def test_help_in_a_new_process_imports_no_torch_and_takes_less_than_a_second(line: str, code: int) -> None:
    """The time is the CPU time of this process, so that other load does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    found_code, imported, _ = imported_by("-m", "caaseg", *line.split())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert (found_code, imported) == (code, set())
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_help_shows_the_values_of_the_recipe() -> None:
    command = [sys.executable, "-m", "caaseg", "train", "folder/caa_resnet18", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = " ".join(shown.replace("│", " ").split())
    assert "--steps INT Optimizer steps. (default: 2000)" in text
    assert "--data.crop INT INT Height and width of training crops. (default: 256 256)" in text
