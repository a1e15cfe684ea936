"""The authors' checkpoints become models with their outputs; damaged and hostile files end with a message."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import caaseg
from caaseg.cli import main
from caaseg.errors import CaasegError
from caaseg.models import load_model
from caaseg.models.authors_weights import torch_name
from caaseg.models.backbones import FeatureInput, TimmBackbone
from caaseg.models.convert import convert, h5_variable
from caaseg.models.tf_checkpoint import TFCheckpoint, crc32c, decompress_snappy
from caaseg.models.weights import load_backbone_weights
from tests.golden.networks import GOLDEN, assert_golden, golden_input, load
from tests.golden.weights_by_formula import weight
from tests.models.tf_writer import VALUE, block_of, entries_of, index_of, write_checkpoint

CHECKPOINTS = ["caa_head_checkpoint", "caa_head_checkpoint_with_optimizer"]
HEAD = GOLDEN / CHECKPOINTS[0] / "ckpt-1"


def head_variables() -> dict[str, Any]:
    """Return the variables of the smaller checkpoint by the names of its model."""
    checkpoint = TFCheckpoint(HEAD)
    names = [name for name in checkpoint.variables if name.startswith("model/")]
    return {name.removeprefix("model/").removesuffix(VALUE): checkpoint.read(name) for name in names}


def assert_stored_outputs(model: caaseg.Segmenter, stored: dict[str, Any]) -> None:
    with torch.no_grad():
        prediction = model.coarse(torch.from_numpy(stored["input"]).permute(0, 3, 1, 2))
    assert_golden(stored, "logits", prediction.logits)
    if prediction.aux is not None:
        assert_golden(stored, "aux_logits", prediction.aux)


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_of_the_authors_converts_and_gives_their_outputs(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load(f"{name}/arrays")
    lists = tmp_path / "lists.json"
    assert main(["convert", str(GOLDEN / name), "--out", str(tmp_path / "model"), "--json", str(lists)]) == 0
    channels = stored["input"].shape[-1]
    printed = capsys.readouterr().out
    assert "the checkpoint contains a head without a backbone" in printed
    assert f"FeatureInput({channels})" in printed
    model = load_model(tmp_path / "model", backbone=FeatureInput(channels))
    assert model.config.aux
    assert_stored_outputs(model, stored)
    told = json.loads(lists.read_text())
    assert told["unknown"] == []
    keys = [*(f"model/{used}{VALUE}" for used in told["used"]), *told["training_state"]]
    assert sorted(keys) == sorted(stored["checkpoint_keys"].tolist())  # every variable is used or reported


def test_variables_that_are_not_in_the_model_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path / "ckpt", {**head_variables(), "other_head/conv/kernel": np.ones((1, 1, 2, 3))})
    assert main(["convert", str(tmp_path / "ckpt"), "--out", str(tmp_path / "model")]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 variables are not in the model and were skipped: other_head/conv/kernel" in printed


def test_the_names_of_the_car_repository_convert_too_with_the_layer_of_car(tmp_path: Path) -> None:
    renamed = {
        "seg_head/entry_convbnrelu": "head/attention_entry_conv",
        "seg_head/end_convbnrelu": "head/attention_end_conv",
        "seg_head/image_level_block": "head/image_level_block",
        "seg_head/ca_blocks/0": "head/caa_block",
        "seg_head_convbnrelu": "head/end_conv",
        "aux_feature_convbnrelu0": "head/aux_conv",
        "aux_loss_logits_conv": "aux_logits_convs/0",
    }
    variables = head_variables()
    for old, new in renamed.items():
        variables = {name.replace(old, new): array for name, array in variables.items()}
    variables["head/gta/linear_conv/kernel"] = np.eye(64, dtype=np.float32)[None, None]
    variables["head/gta/linear_conv/bias"] = np.zeros(64, np.float32)
    write_checkpoint(tmp_path / "ckpt-7", variables, compressed=True)
    result = convert(tmp_path / "ckpt-7.index", tmp_path / "model")
    assert sorted(result.unknown) == sorted(name for name in variables if name.startswith(("head/aux", "aux_logits")))
    model = load_model(tmp_path / "model", backbone=FeatureInput(24))
    assert (model.config.car, model.config.aux) == (True, False)
    assert_stored_outputs(model, load(f"{CHECKPOINTS[0]}/arrays"))


@pytest.mark.slow
def test_a_whole_model_converts_and_gives_the_authors_logits(tmp_path: Path) -> None:
    stored = load("caa_efficientnetb0_os8")
    shapes = zip(stored["variable_names"].tolist(), stored["variable_shapes"].tolist(), strict=True)
    seed = int(stored["seed"])
    arrays = {name: weight(name, [int(side) for side in shape.split("x")], seed) for name, shape in shapes}
    write_checkpoint(tmp_path / "ckpt", arrays)
    result = convert(tmp_path / "ckpt", tmp_path / "model", output_stride=8)
    assert (result.feature_channels, result.unknown, len(result.used)) == (None, [], len(arrays))
    model = load_model(tmp_path / "model")
    assert model.backbone.mean == (0.5, 0.5, 0.5)
    with torch.no_grad():
        assert_golden(stored, "logits_image_size", model(golden_input(stored)).logits)


def test_names_of_the_jpu_and_of_other_things() -> None:
    assert torch_name("head/jpu/endpoints_convs/1/bn/gamma") == "neck.entries.1.1.weight"
    assert torch_name("head/jpu/end_depthwise_convs/3/depthwise_kernel") == "neck.branches.3.0.weight"
    assert torch_name("head/jpu/end_pointwise_convs/0/conv/kernel") == "neck.branches.0.2.0.weight"
    assert torch_name("backbone/blocks/3/se_reduce/bias", [1, 2, 2]) == "backbone.net.blocks.2.0.se.conv_reduce.bias"
    for unknown in ("optimizer/iter", "backbone/blocks/99/dwconv/kernel", "seg_head/entry_convbnrelu/conv/other"):
        assert torch_name(unknown, [1, 2, 2]) is None


@pytest.mark.slow
def test_an_h5_file_of_a_backbone_becomes_pretrained_weights(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    stored = load("efficientnetb0_os16")
    shapes = zip(stored["variable_names"].tolist(), stored["variable_shapes"].tolist(), strict=True)
    seed, stages = int(stored["seed"]), (1, 2, 2, 3, 3, 4, 1)
    letters = [f"block{number}{chr(97 + k)}" for number, length in enumerate(stages, 1) for k in range(length)]
    with h5py.File(tmp_path / "b0.h5", "w") as file:
        for name, shape in shapes:
            _, *path, layer, kind = name.split("/")
            if path:
                layer = {"dwconv_bn": "bn", "expand_conv_bn": "expand_bn"}.get(layer, layer)
                layer = f"{letters[int(path[1])]}_{layer}"
            layer = "stem_bn" if layer == "steam_conv_bn" else layer
            file[f"{layer}/efficientnetb0/{layer}/{kind}:0"] = weight(name, [int(s) for s in shape.split("x")], seed)
    result = convert(tmp_path / "b0.h5", tmp_path / "b0.safetensors")
    assert (result.config, result.unknown) == (None, [])
    options: dict[str, Any] = {"output_stride": 16, "dilation": "authors", "top_features": True}
    backbone = TimmBackbone("tf_efficientnet_b0", **options).eval()
    load_backbone_weights(backbone, tmp_path / "b0.safetensors")
    with torch.no_grad():
        assert_golden(stored, "final", backbone(golden_input(stored)).coarse)


def test_names_in_h5_files() -> None:
    names = {f"block{block}_bn/gamma:0" for block in ("1a", "2a", "2b", "3a")}
    assert (
        h5_variable("x/resnet50/conv3_block2_0_conv/kernel:0", ()) == "backbone/stacks/1/blocks/1/shortcut_conv/kernel"
    )
    assert h5_variable("conv2_block1_3_bn/moving_mean:0", ()) == "backbone/stacks/0/blocks/0/conv3_bn/moving_mean"
    assert h5_variable("block3a_bn/beta:0", names) == "backbone/blocks/3/dwconv_bn/beta"
    assert h5_variable("stem_bn/beta:0", names) == "backbone/steam_conv_bn/beta"


def test_an_h5_file_that_leads_elsewhere_or_is_damaged_is_refused(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["conv1_1_conv"] = h5py.ExternalLink("other.h5", "/secret")
    with h5py.File(tmp_path / "loop.h5", "w") as file:
        group = file.create_group("a")
        group["b"] = group
    (tmp_path / "noise.h5").write_bytes(random.Random(0).randbytes(2000))
    for name, reason in (("link", "conv1_1_conv is a link"), ("loop", "contain each other"), ("noise", "")):
        with pytest.raises(CaasegError, match=rf"{name}\.h5: damaged or not an \.h5 file of weights \(.*{reason}"):
            convert(tmp_path / f"{name}.h5", tmp_path / "out.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda variables: variables.pop("logits_conv/bias"), "1 missing: classifier.bias"),
        (lambda variables: variables.pop("logits_conv/kernel"), "weights of classifier are missing"),
        (
            lambda variables: variables.update({"seg_head_convbnrelu/bn/gamma": np.ones(5)}),
            "1 of another shape: head.bottleneck.1.weight (5,) instead of (16,)",
        ),
        (lambda variables: variables.update({"backbone/layers/0/kernel": np.ones((1, 1))}), "other backbones are not"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    variables = head_variables()
    change(variables)
    write_checkpoint(tmp_path / "ckpt", variables)
    with pytest.raises(CaasegError, match=re.escape(message)):
        convert(tmp_path / "ckpt", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_conversion_overwrites_nothing(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("mine")
    with pytest.raises(CaasegError, match="already exists; expected a new path, because a conversion overwrites"):
        convert(Path("checkpoint"), tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CaasegError, match=r"nothing: no such checkpoint; expected NAME\.index next to"):
        convert(tmp_path / "nothing", tmp_path / "model")
    with pytest.raises(CaasegError, match=r"expected the \.index file of one checkpoint, found none"):
        convert(tmp_path, tmp_path / "model")
    shutil.copy(f"{HEAD}.index", tmp_path)
    with pytest.raises(
        CaasegError, match=r"ckpt-1\.data-00000-of-00001: no such file; the checkpoint has 1 data files"
    ):
        convert(tmp_path, tmp_path / "model")


def outcome(path: Path) -> int | str:
    """Return the number of weights that can be read, or the message."""
    try:
        checkpoint = TFCheckpoint(path)
        return len([checkpoint.read(name) for name, found in checkpoint.variables.items() if found.dtype == 1])
    except CaasegError as error:
        return str(error)


def test_damaged_files_are_found_by_their_checksums(tmp_path: Path) -> None:
    generator = random.Random(0)
    for suffix in (".index", ".data-00000-of-00001"):
        original = Path(f"{HEAD}{suffix}").read_bytes()
        for _ in range(12):
            for path in HEAD.parent.glob("ckpt-1.*"):
                shutil.copy(path, tmp_path)
            damaged = bytearray(original)
            position = generator.randrange(len(damaged))
            if generator.random() < 0.3:
                damaged = damaged[:position]
            else:
                damaged[position] ^= 1 << generator.randrange(8)
            (tmp_path / f"ckpt-1{suffix}").write_bytes(damaged)
            found = outcome(tmp_path / "ckpt-1")
            # The damage may be in bytes that no weight needs.
            assert found == 56 or "damaged or not a TensorFlow checkpoint" in str(found)


def test_hostile_files_with_right_checksums_end_with_a_message_or_are_read(tmp_path: Path) -> None:
    generator = random.Random(1)
    entries, data = entries_of({f"model/v{k}{VALUE}": np.ones((k + 1, 3)) for k in range(4)})
    (tmp_path / "c.data-00000-of-00001").write_bytes(data)
    outcomes = set()
    for trial in range(400):
        block = bytearray(block_of(entries))
        for _ in range(generator.randrange(1, 4)):
            block[generator.randrange(len(block))] = generator.choice([0, 1, 127, 128, 255, generator.randrange(256)])
        (tmp_path / "c.index").write_bytes(index_of(bytes(block), kind=int(trial % 5 == 0)))
        outcomes.add(outcome(tmp_path / "c"))
    assert len(outcomes) > 5


def test_checksum_and_decompression_are_the_published_ones() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    content = random.Random(2).randbytes(5000)
    reference = 0xFFFFFFFF
    for byte in content:
        reference ^= byte
        for _ in range(8):
            reference = (reference >> 1) ^ (0x82F63B78 if reference & 1 else 0)
    assert crc32c(content) == reference ^ 0xFFFFFFFF
    literal, copies = b"\x08abc", [b"\x01\x03", b"\x0a\x01\x00", b"\x07\x02\x00\x00\x00"]  # offsets of 1, 2 and 4 bytes
    assert decompress_snappy(b"\x0c" + literal + b"".join(copies)) == b"abc" + b"abca" + b"aaa" + b"aa"
    for wrong in (b"\x0d" + literal, b"\x03\x01\x03", b"\x03" + literal + copies[1], b"\xff" * 12):
        with pytest.raises(ValueError, match=r"compressed block|too early|too long"):
            decompress_snappy(wrong)
