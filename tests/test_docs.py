"""Every page of the documentation runs from top to bottom, and its links, commands and quoted messages exist.

A block of `python` or `sh` is run. A block of `yaml` starts with the name of the file that it is written to. A block of
`diff` is applied to a copy of the package. A block of `console` is only parsed: its commands need several GPUs, a
network, a browser or the paper's data. A block of `js` starts with the name of its file, and its syntax is checked.
Pages that train models run in the slow tests; the fast tests parse all commands, apply the diffs and resolve the
imports of all pages.
"""

import ast
import importlib
import importlib.util
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.distributed.run import get_args_parser

from caaseg import cli
from caaseg.errors import CaasegError
from caaseg.recipes import load_recipe
from tests.data import exports
from tests.reader_files import model_and_calibration_photos, model_and_photos, sample_photo
from tests.training.small import images_and_masks

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "caaseg"
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
SHAPES = re.compile(r"^([\w.]+)(?: = .*?)?\s+# (\([\d, ]+\))", re.MULTILINE)
PREPARATIONS: dict[str, Callable[[], object]] = {
    "deployment.md": model_and_calibration_photos,
    "fine-tuning.md": lambda: images_and_masks(Path("my-data")),
    "get-started.md": sample_photo,
    "label-imports.md": lambda: exports.coco(Path("coco-export")),
    "prediction.md": model_and_photos,
    "your-images.md": lambda: images_and_masks(Path("my-data")),
}
TAKE_LONG = (
    *("datasets", "deployment", "determinism", "extending", "fine-tuning", "get-started", "label-imports", "models"),
    *("prediction", "research", "run-directory", "the-block", "your-images"),
)
OPTIONAL = "openvino"  # a package of a tutorial that nothing else needs


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return language and text of each code block, in order."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each command; a backslash joins lines, and comments are left out."""
    lines = text.replace("\\\n", " ").splitlines()
    return [arguments for arguments in (shlex.split(line, comments=True) for line in lines) if arguments]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_the_main_pages_exist() -> None:
    three_guides = {"your-images.md", "research.md", "the-block.md"}
    assert {page.name for page in PAGES} >= three_guides | {"architecture.md", "factorisation.md", "many-devices.md"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_changes_and_imports_of_a_page_exist(page: Path, tmp_path: Path) -> None:
    package: Path | None = None
    for language, text in blocks(page):
        match language:
            case "python":
                check_imports(text, page)
            case "sh" | "console":
                for arguments in commands(text):
                    check_exists(arguments)
            case "diff":
                package = package or shutil.copytree(SOURCE, tmp_path / "caaseg")
                make_change(text, package)


@pytest.mark.filterwarnings("ignore:.* was trained on . classes and is loaded with 5")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow if page.stem in TAKE_LONG else ()) for page in PAGES],
    ids=lambda page: page.stem,
)
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    PREPARATIONS.get(page.name, lambda: None)()
    names: dict[str, Any] = {"__name__": page.stem}
    changed: Path | None = None
    skipped = False
    for language, text in blocks(page):
        match language:
            case "python" if f"import {OPTIONAL}" in text and importlib.util.find_spec(OPTIONAL) is None:
                skipped = True
            case "python":
                if named := re.match(r"# (\w+\.py)\n", text):  # a file that the reader writes
                    Path(named[1]).write_text(text)
                run_snippet(text, names, page)
            case "sh":
                for arguments in commands(text):
                    assert arguments[0] == "caaseg", f"{page.name}: {arguments} belongs in a console block"
                    assert run_command(arguments[1:], changed) == 0, arguments
            case "console":
                for arguments in commands(text):
                    check_exists(arguments)
            case "diff":
                changed = changed or shutil.copytree(SOURCE, tmp_path / "changed" / "caaseg")
                make_change(text, changed)
            case "yaml":
                first = text.partition("\n")[0]
                Path(first.removeprefix("# ")).write_text(text)
            case "js":
                file = text.partition("\n")[0].removeprefix("// ")
                Path(file).write_text(text)
                if node := shutil.which("node"):
                    subprocess.run([node, "--check", file], check=True)
            case _:
                assert language == "", f"{page.name}: nobody runs {language}"
    if skipped:
        pytest.skip(f"{page.name}: everything ran except the blocks that import {OPTIONAL}, which is not installed")


def check_imports(text: str, page: Path) -> None:
    """Check that the modules and names that a snippet imports from the package exist."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "caaseg":
            module = importlib.import_module(node.module or "")
            for alias in node.names:
                assert hasattr(module, alias.name), f"{page.name}: from {node.module} import {alias.name}"


def run_snippet(text: str, names: dict[str, Any], page: Path) -> None:
    """Run a snippet, and compare values with the shapes in the comments behind them."""
    exec(compile(text, str(page), "exec"), names)
    for expression, shape in SHAPES.findall(text):
        value = eval(expression, names)
        assert tuple(getattr(value, "shape", value)) == eval(shape), f"{page.name}: {expression}"


def run_command(arguments: list[str], changed: Path | None) -> int:
    """Run a command in this process, or in a new one if the page has changed the package."""
    if changed is None:
        return cli.main(arguments)
    there = {**os.environ, "PYTHONPATH": str(changed.parent), "TRITON_INTERPRET": "0"}
    ended = subprocess.run([sys.executable, "-m", "caaseg", *arguments], env=there, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.returncode


def make_change(text: str, package: Path) -> None:
    """Apply a diff without line numbers; the lines before the change must occur once."""
    for part in re.split(r"^--- src/caaseg/", text, flags=re.MULTILINE)[1:]:
        file, _, hunks = part.partition("\n")
        content = (package / file).read_text()
        for hunk in hunks.split("@@\n"):
            lines = hunk.splitlines(keepends=True)
            before = "".join(line[1:] for line in lines if line[0] in " -")
            assert content.count(before) == 1, f"{file} has changed: {before}"
            content = content.replace(before, "".join(line[1:] for line in lines if line[0] in " +"))
        (package / file).write_text(content)


def check_exists(arguments: list[str]) -> None:
    """Check that the command, its options and its values exist, without running it."""
    if arguments[0] == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert arguments[1] == "install"
        asked = re.fullmatch(r"\.(?:\[([\w,]+)\])?", arguments[2])
        assert asked is not None, arguments
        assert set((asked[1] or "dev").split(",")) <= set(extras), arguments
        return
    if arguments[0] == "torchrun":
        started = get_args_parser().parse_args(arguments[1:])
        assert started.module
        arguments = [started.training_script, *started.training_script_args]
    if arguments[0] == "srun":
        arguments = arguments[1:]
    assert arguments[0] == "caaseg", arguments

    _, options = cli.parse(arguments[1:])
    if options.get("recipe") and Path(options["recipe"]).suffix != ".yaml":  # files are written by the reader
        load_recipe(options["recipe"], options.get("overrides") or ())


def test_a_command_that_does_not_exist_is_detected() -> None:
    for line in (
        "caaseg ap my-run",
        "caaseg app --hots 0.0.0.0 my-run",
        "torchrun --nproc 2 -m caaseg train --outt x y",
    ):
        with pytest.raises((SystemExit, CaasegError)):
            check_exists(shlex.split(line))
    with pytest.raises(CaasegError):
        check_exists(shlex.split("caaseg train camvid/caa_resnet50 --model.output_stride 9"))


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_links_and_images_exist(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?://)(.*?)\)", prose(page)):
        file, _, heading = link.partition("#")
        target = page if file == "" else page.parent / file
        assert target.is_file(), f"{page.name}: {link}"
        if heading:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]
            assert heading in slugs, f"{page.name}: {link}"


@pytest.mark.parametrize("page", LINKED, ids=lambda page: page.stem)
def test_commands_and_files_in_the_text_exist(page: Path) -> None:
    for name in re.findall(r"`caaseg ([a-z]+)", prose(page)):
        assert name in cli.COMMANDS["caaseg"].split(), f"{page.name}: caaseg {name}"
    if page.name in ("architecture.md", "research.md", "factorisation.md"):
        files = re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.py)`", prose(page))
        assert files
        for file in files:
            assert (SOURCE / file).is_file(), f"{page.name}: {file}"


def test_quoted_messages_are_in_the_source() -> None:
    source = "".join(path.read_text() for path in SOURCE.rglob("*.py"))
    table = (ROOT / "docs" / "your-images.md").read_text().partition("## Error messages")[2]
    quoted = re.findall(r"^\| `(.*?)` \|", table, re.M)
    assert len(quoted) > 10
    for message in quoted:
        assert message in source, message


def check_figure(drawn_file: Path, committed_file: Path) -> None:
    """Check that a figure is the committed one."""
    with Image.open(drawn_file) as drawn, Image.open(committed_file) as committed:
        assert drawn.mode == committed.mode
        assert drawn.size == committed.size
        difference = np.abs(np.asarray(drawn, dtype=float) - np.asarray(committed, dtype=float))
    assert difference.mean() < 1  # of 255: versions of the fonts may differ a little


def test_figures_are_the_output_of_their_scripts(tmp_path: Path) -> None:
    """Those of camvid.py need the dataset, and some minutes."""
    figures = ROOT / "docs" / "figures"
    subprocess.run([sys.executable, str(figures / "factorisation.py"), str(tmp_path / "factorisation.png")], check=True)
    runpy.run_path(str(figures / "benchmarks.py"))["draw"](tmp_path)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == [
        *("attention.png", "camvid_heads.png", "camvid_heads_classes.png", "factorisation.png", "growth.png"),
        "scenes_heads_classes.png",
    ]
    for name in drawn:
        check_figure(tmp_path / name, figures / name)
