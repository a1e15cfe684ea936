"""FLOPs counts by hand, and the paper's columns."""

import json

import pytest

from caaseg.analysis.flops import CONVENTION, count, paper_rows
from caaseg.cli import main
from caaseg.models import ModelConfig, create_model


def test_counts_equal_a_calculation_by_hand() -> None:
    config = ModelConfig(head="caa", backbone="resnet18", num_classes=5, output_stride=16, channels=32, gate_width=16)
    counted = count(config, (65, 97))
    pixels, c, d = 5 * 7, 32, 64
    gate = c * 16 + 4 * 16 * 16 + 16 * c  # per position
    entry, block = 9 * 512 * c, c * (2 * d + c)
    attention = pixels * (d + c) * (5 + 7)  # scores and weighted sums, columns and rows
    image_level = 512 * c + c * 256  # once per image
    frame = pixels * (entry + block + c * c + c * 256 + 256 * 5) + image_level
    assert counted.gates == (5 + 7) * gate
    assert counted.head == frame + attention
    assert counted.total == counted.backbone + counted.head + counted.gates
    model = create_model("caa", backbone="resnet18", num_classes=5, channels=32, gate_width=16)
    assert counted.parameters == sum(weight.numel() for weight in model.parameters())


def test_axial_has_the_count_of_caa_without_gates() -> None:
    gated, plain = (
        count(ModelConfig(head=head, backbone="resnet18", num_classes=5), (65, 65)) for head in ("caa", "axial")
    )
    assert plain.gates == 0
    assert (gated.backbone, gated.head) == (plain.backbone, plain.head)


def test_an_upsampled_input_has_the_count_of_an_image_of_that_size() -> None:
    plain = ModelConfig(head="caa", backbone="resnet18", num_classes=5)
    counted, expected = count(plain.replace(input_upsampling=2.0), (33, 49)), count(plain, (65, 97))
    assert counted == expected
    assert counted.total > 3 * count(plain, (33, 49)).total


@pytest.mark.slow
def test_the_paper_s_columns_are_reproduced(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row.part: row for row in paper_rows()}
    for what, expected in {
        "backbone, stride 16, standard ResNet-101": 54.7,
        "backbone, stride 8, standard ResNet-101": 182.8,
        "backbone, stride 16, authors' ResNet-101": 59.7,
        "backbone, stride 8, authors' ResNet-101": 188.8,
    }.items():
        assert round(rows[what].ours / 1e9, 1) == expected, what
    assert rows["backbone, stride 8, authors' ResNet-101"].paper == 190.70e9
    assert rows["backbone, stride 16, authors' ResNet-101"].paper == 59.85e9
    whole = rows["axial attention with the authors' ResNet-101"]
    assert (whole.table, whole.paper) == ("1", 68.7e9)
    assert whole.note.startswith("deduced")
    assert whole.ours == rows["backbone, stride 16, authors' ResNet-101"].ours + rows["axial head, stride 16"].ours
    for stride, published in ((16, 8.85e9), (8, 34.33e9)):
        heads = [
            rows[f"{head}, stride {stride}"] for head in ("axial head", "CAA head", "CAA head with auxiliary branch")
        ]
        assert {row.paper for row in heads} == {published}
        assert heads[0].ours < heads[1].ours < heads[2].ours
    gates = {what: row for what, row in rows.items() if what.startswith("channelization")}
    assert len(gates) == 6
    assert round(gates["channelization, 5 x 128"].ours / 1e9, 3) == 0.013
    assert sum("which matches the paper" in row.note for row in gates.values()) == 4
    assert all(row.note for row in rows.values())
    assert all(("deduced" in row.note) != what.startswith("backbone") for what, row in rows.items())


def test_the_command_prints_and_writes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["flops", "--head", "danet", "--backbone", "resnet18", "--output-stride", "8", "--size", "65x33"]
    assert main([*arguments, "--json", "-"]) == 0
    out, err = capsys.readouterr()
    content = json.loads(out)
    assert content["total"] == content["backbone"] + content["head"] + content["gates"]
    assert content["gates"] == 0
    assert content["parameters"] > 11_000_000
    assert content["convention"] == CONVENTION
    assert "one multiply-add counted as one" in content["convention"]
    assert "danet on resnet18, stride 8, 65 x 33" in err


@pytest.mark.slow
def test_the_paper_s_tables_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["flops", "--paper"]) == 0
    shown = capsys.readouterr().out
    for figure in ("59.85", "59.70", "54.71", "190.70", "188.82", "182.75", "0.00030", "0.01298", "101.25"):
        assert figure in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head", "cab"], "--head is 'cab'; expected fcn, axial"),
        (["--backbone", "resnet5"], "backbone 'resnet5' is not a timm model; did you mean resnet50"),
        (["--size", "3x3x3"], "--size is '3x3x3'; expected at most 2 items"),
        (["--backbone", "resnet18d", "--resnet-variant", "authors"], "backbone resnet18d is not a plain ResNet, which"),
        (["--backbone", "test_efficientnet", "--resnet-variant", "authors"], "backbone test_efficientnet is not a"),
        (["--size", "99999999999"], "--size is [99999999999]; expected less than or equal to 1000000"),
        (["--size", "0"], "--size is [0]; expected greater than or equal to 1"),
    ],
)
def test_bad_options_end_with_exit_code_2_and_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["flops", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"caaseg: {message}")
