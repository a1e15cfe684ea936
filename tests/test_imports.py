"""What importing the package and asking for help costs."""

import subprocess
import sys

HEAVY = ("lightning", "timm", "torchvision", "matplotlib", "torch")


def modules_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after running some code."""
    probe = f"{code}\nimport sys\nprint('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return set(result.stdout.rsplit("LOADED", 1)[1].split())


def test_importing_the_package_loads_nothing_heavy_and_prints_nothing() -> None:
    assert modules_after("import caaseg") == set()


def test_importing_the_attention_loads_torch_alone() -> None:
    assert modules_after("import caaseg.attention") == {"torch"}


def test_help_and_usage_errors_answer_without_torch() -> None:
    for words, code in (
        (["--help"], 0),
        (["benchmark", "--help"], 0),
        (["benchmark", "attention", "--help"], 0),
        (["benchmark", "loader", "--help"], 0),
        (["data", "show", "--help"], 0),
        (["benchmark", "attention", "--devise", "cpu"], 2),
        (["evaluate", "--help"], 0),
        (["app", "--help"], 0),
        (["app", "my-model", "--prot", "80"], 2),
        (["evaluate", "my-model"], 2),
        (["conflicts", "--help"], 0),
        (["compare", "--help"], 0),
        (["compare", "my-model"], 2),
        (["data", "--help"], 0),
        (["data", "check", "--help"], 0),
        (["data", "prepare", "camvid"], 2),
        (["train", "--help"], 0),
        (["demo", "--help"], 0),
        (["recipes", "--help"], 0),
        (["reproduce", "--help"], 0),
        (["reproduce", "table2"], 2),
        (["reproduce", "table2", "--out", "x", "--seads", "2"], 2),
        (["train", "scenes/caa_resnet18", "--devise", "cpu"], 2),
        (["nothing"], 2),
        ([], 2),
    ):
        expected = f"except SystemExit as e: code = e.code\nassert code == {code}, code"  # help ends so
        run = f"from caaseg.cli import main\ntry: code = main({words!r})\n{expected}"
        probe = f"import contextlib, os\nwith contextlib.redirect_stderr(open(os.devnull, 'w')):\n  exec({run!r})"
        assert modules_after(probe) == set(), words
