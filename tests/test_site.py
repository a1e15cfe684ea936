"""The documentation site builds without a warning, its reference is complete, its links and its notebook work."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import nbformat
import pytest
from docs._extensions.command_reference import command_names, commands, dataset_list, recipe_list, recipe_values
from nbclient import NotebookClient

import caaseg
import caaseg.attention

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
TEXTS = [*PAGES, *sorted(ROOT.glob("*.md"))]
ADDRESS = re.compile(r"https?://[^\s<>)\"'`]+")
CAMVID = ROOT.parent / "shared" / "data" / "camvid"


def test_every_command_and_option_is_in_the_reference() -> None:
    text = commands()
    assert "caaseg data import" in command_names()
    for name in command_names():
        assert f"## {name}\n" in text
    assert "| `--compare-grids` | `false` |" in text
    assert "| `MODEL` | required |" in text


def test_recipe_values_recipes_and_datasets_are_in_the_reference() -> None:
    assert "| `model.output_stride` | `16` | Stride of the features that the head reads. |" in recipe_values()
    assert "`camvid/caa_resnet18`" in recipe_list()
    assert "`table1/caa_gate3x128`" in recipe_list()
    assert "| `camvid` | CamVid, SegNet split | 11 |" in dataset_list()


def test_every_public_name_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text()
    listed = set(re.findall(r"^\.\. auto\w+:: (\w+)$", text, re.MULTILINE))
    public = {*caaseg.__all__, *caaseg.attention.__all__} - {"__version__"}
    assert listed == public | {"CaasegError"}
    for module in ("caaseg", "caaseg.attention", "caaseg.errors"):
        importlib.import_module(module)


def test_every_page_is_in_a_table_of_contents() -> None:
    index = (ROOT / "docs" / "index.md").read_text()
    for page in PAGES:
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix()
        assert name == "index" or f"\n{name}\n" in index, name


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.stem)
def test_external_links_are_valid(page: Path) -> None:
    """Addresses have a scheme and a host. With CAASEG_CHECK_LINKS=1 they are requested too, which needs a network."""
    for address in ADDRESS.findall(page.read_text()):
        parts = urlsplit(address.rstrip(".,;:"))
        assert re.fullmatch(r"[\w.-]+\.[a-z]{2,}", parts.hostname or ""), address
        if os.environ.get("CAASEG_CHECK_LINKS") == "1":
            check_answers(parts.geturl())


def check_answers(address: str) -> None:
    request = Request(address, method="HEAD", headers={"User-Agent": "caaseg-link-check"})
    try:
        with urlopen(request, timeout=20) as answer:
            assert answer.status < 400, address
    except URLError as error:
        pytest.fail(f"{address}: {error}")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, "-m", "sphinx", "-b", "html", "-W", "--keep-going", "-q", "docs", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, **paths},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    for page in PAGES:
        assert (tmp_path / page.relative_to(ROOT / "docs")).with_suffix(".html").is_file()
    reference = (tmp_path / "reference" / "command-line.html").read_text()
    assert 'id="caaseg-data-import"' in reference
    api = (tmp_path / "reference" / "api.html").read_text()
    assert 'id="caaseg.attention.ChannelizedAxialAttention"' in api


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CamVid if it is there, otherwise on drawn scenes."""
    if CAMVID.is_dir():
        (tmp_path / "data").symlink_to(CAMVID.parent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    notebook = nbformat.read(  # type: ignore[no-untyped-call]
        ROOT / "docs" / "notebooks" / "tour.ipynb", as_version=4
    )
    assert not any(cell.get("outputs") for cell in notebook.cells), "store the notebook without outputs"
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert ("camvid 11 classes" if CAMVID.is_dir() else "scenes 8 classes") in printed
    assert "mean IoU on 20 other images" in printed
    assert (tmp_path / "tour-run" / "report.html").is_file()
