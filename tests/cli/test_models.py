"""`caaseg models` lists backbones as they are."""

import json
from pathlib import Path

import pytest

from caaseg.cli import main
from caaseg.models.families import FAMILIES, Family, access
from caaseg.models.timm_networks import describe


def test_families_are_listed_with_strides_necks_size_and_license(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "--json", str(tmp_path / "models.json")]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "family model parameters strides no neck necks weights"
    assert "DINOv2 vit_small_patch14_dinov2.lvd142m 22.1 M 14 - resize sfp free (apache-2.0)" in lines
    assert "ResNet resnet50.tv_in1k 23.5 M 4 8 16 32 8 16 32 resize jpu free (bsd-3-clause)" in lines
    listed = json.loads((tmp_path / "models.json").read_text())["models"]
    assert [row["family"] for row in listed] == [family.name for family in FAMILIES]


def test_a_pattern_lists_the_models_of_this_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "test_vit?"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["test_vit2", "test_vit3", "test_vit4"]
    assert main(["models", "test_vit.r160_in1k", "--json", "-"]) == 0
    captured = capsys.readouterr()
    (row,) = json.loads(captured.out)["models"]
    assert (row["name"], row["strides"], row["output_strides"], row["necks"]) == (
        "test_vit",
        [16],
        [16],
        ["resize", "sfp"],
    )
    assert row["weights"] == [{"tag": "r160_in1k", "license": "apache-2.0", "access": "free"}]
    assert "test_vit.r160_in1k: free (apache-2.0)" in captured.err


def test_a_model_that_cannot_be_used_is_listed_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "visformer_tiny"]) == 0
    assert "cannot be used: features_only not implemented for Vision Transformer" in capsys.readouterr().out


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "resnet5000"]) == 2
    assert (
        "PATTERN is 'resnet5000'; no timm model has this name; caaseg models lists families" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("mit", "free"),
        ("cc-by-nc-4.0", "non-commercial"),
        ("dinov3-license", "own terms"),
        ("unknown", "unknown"),
        (None, "unknown"),
    ],
)
def test_licenses_decide_whether_weights_are_free(name: str | None, expected: str) -> None:
    assert access(name) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_are_as_listed(family: Family) -> None:
    found, listed = describe(family.example), family.described()
    (weights,) = listed.pop("weights")
    assert weights in found.pop("weights")
    assert found == {key: value for key, value in listed.items() if key != "family"}
