"""Costs of importing the package and of help."""

import resource
import subprocess
import sys

import pytest

HEAVY = ("lightning", "timm", "torchvision", "matplotlib", "torch")


def modules_after(code: str) -> set[str]:
    """Return the heavy packages that a new interpreter has imported after some code."""
    probe = f"{code}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return set(result.stdout.rsplit("LOADED", 1)[1].split())


def test_importing_the_package_loads_nothing_heavy_and_prints_nothing() -> None:
    assert modules_after("import caaseg") == set()


def test_importing_the_attention_loads_torch_alone() -> None:
    assert modules_after("import caaseg.attention") == {"torch"}


@pytest.mark.parametrize(
    ("words", "code"),
    [
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
    ],
)
def test_help_and_usage_errors_import_no_torch_and_take_less_than_a_second(words: str, code: int) -> None:
    """The time is that of this process alone, so that other load does not count."""
    probe = [sys.executable, "-X", "importtime", "-m", "caaseg", *words.split()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(probe, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == code, result.stderr
    imported = {
        line.rpartition("|")[2].strip() for line in result.stderr.splitlines() if line.startswith("import time")
    }
    assert not imported & set(HEAVY)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_help_shows_the_values_of_the_recipe() -> None:
    command = [sys.executable, "-m", "caaseg", "train", "folder/caa_resnet18", "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = " ".join(shown.replace("│", " ").split())
    assert "--steps STEPS Optimizer steps. (an integer of 1 or more; default: 2000)" in text
    assert (
        "--data.crop CROP Height and width of training crops. (2 integers from 1 to 1000000; default: 256 256)" in text
    )
