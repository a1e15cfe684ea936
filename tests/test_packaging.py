"""Wheel, sdist and citation: content, metadata, versions."""

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import caaseg

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "caaseg"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with wheel and sdist; the wheel is built from the sdist, as for a release."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return out


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = Parser().parsestr(archive.read(f"caaseg-{caaseg.__version__}.dist-info/METADATA").decode())
    assert {name.partition("/")[0] for name in names} == {"caaseg", f"caaseg-{caaseg.__version__}.dist-info"}
    expected = [path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert {name for name in names if name.startswith("caaseg/")} == {
        f"caaseg/{path.relative_to(PACKAGE).as_posix()}" for path in expected
    }
    for file in (
        "app/page/index.html",
        "data/datasets/tables/camvid.yaml",
        "py.typed",
        "recipes/folder/finetune.yaml",
        "reports/templates/page.html.j2",
        "shipped/camvid/model.safetensors",
        "shipped/sample/summer-palace.jpg",
    ):
        assert f"caaseg/{file}" in names
    assert metadata["Version"] == caaseg.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.11"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(metadata.get_all("Provides-Extra") or []) == set(extras)


@pytest.mark.slow
def test_the_sdist_holds_sources_tests_and_documentation(built: Path) -> None:
    [sdist] = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for file in ("pyproject.toml", "run", "tests/test_packaging.py", "docs/conf.py", "CITATION.cff", "LICENSE"):
        assert file in names
    assert not [name for name in names if "_build" in name or "__pycache__" in name or name.startswith(".venv")]


@pytest.mark.slow
def test_the_metadata_renders(built: Path) -> None:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(built.iterdir()))]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("PASSED") == 2


def test_the_citation_names_the_version_and_the_authors_of_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == caaseg.__version__
    assert citation["authors"] == [{"name": "The caaseg contributors"}]
    authors = [author["family-names"] for author in citation["preferred-citation"]["authors"]]
    assert authors == ["Huang", "Kang", "Jia", "He", "Liu"]


def test_the_changelog_has_the_headings_of_keep_a_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert versions[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d{2}-\d{2}", version) for version in versions[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_workflows_issue_templates_and_hooks_are_valid() -> None:
    for file in [*ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml"]:
        assert isinstance(yaml.safe_load(file.read_text()), dict), file
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["tests"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    release = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}  # trusted publishing, no token
