"""Attributes of the built-in heads; custom heads and backbones."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caaseg
from caaseg.config import Architecture, ModelConfig
from caaseg.models import HEADS, Segmenter, with_output_stride
from caaseg.models.backbones import Features
from caaseg.models.export import Deployed
from caaseg.models.folding import fold_batch_norm
from caaseg.models.fused_norm import fuse_batch_norm
from caaseg.models.heads import head_class
from caaseg.models.heads.base import AttentionHead, Head, HeadFeatures
from tests.small_models import small_model, with_statistics

HEAD_FILE = Path(__file__).with_name("mean_head.py")


def test_the_table_of_heads_does_not_import_torch() -> None:
    script = Path(__file__).with_name("heads_without_torch.py")
    assert subprocess.run([sys.executable, script], check=False).returncode == 0


@pytest.mark.parametrize("name", HEADS)
def test_declared_attributes_agree_with_behavior(name: str) -> None:
    kind, model = head_class(name), small_model(name)
    assert isinstance(model.head, kind)
    assert kind.title != Head.title
    outputs: list[HeadFeatures] = []
    model.head.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    prediction = model(torch.randn(2, 3, 33, 33))
    assert tuple(outputs[0].branches) == kind.branches
    assert tuple(prediction.branches) == (*kind.branches, *outputs[0].logits)
    refused = pytest.raises(ValueError, match="a batch of one image") if kind.needs_two_images else nullcontext()
    with refused:
        model(torch.randn(1, 3, 33, 33))
    assert (model.head.attention_block() is None) == (kind.without_attention != Head.without_attention)
    assert bool(kind.views) == (kind.conflict_wording is not None)
    if kind.views and not kind.averages_gates:
        assert kind.views[:-1] == kind.branches


class RowMeans(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        return features + features.mean(3, keepdim=True)


class RowMeansHead(AttentionHead):
    def build_block(self, config: Architecture) -> nn.Module:
        return RowMeans()


@pytest.mark.parametrize("head", HEADS)
def test_a_head_runs_in_16_bits_without_autocast(head: str) -> None:
    model = with_statistics(small_model(head)).eval()
    images = torch.randn(1, 3, 65, 97)
    with torch.no_grad():
        expected = model(images).logits
        found = model.bfloat16()(images.bfloat16()).logits
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).norm() < 0.1 * expected.norm()


def test_a_head_class_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    model = with_statistics(small_model(RowMeansHead, aux=True))
    assert model.config.head == "tests.models.test_heads:RowMeansHead"
    model.save_pretrained(tmp_path)
    images = torch.randn(1, 3, 33, 40)
    with pytest.raises(ValueError, match=r"head is '.*test_heads:RowMeansHead', which is not built in; pass"):
        caaseg.load_model(tmp_path)
    loaded = caaseg.load_model(tmp_path, head=RowMeansHead)
    assert torch.equal(loaded(images).logits, model(images).logits)
    with torch.no_grad():
        torch.testing.assert_close(fold_batch_norm(model)(images).logits, model(images).logits, atol=1e-5, rtol=1e-4)
    assert isinstance(with_output_stride(model, 8).head, RowMeansHead)
    assert isinstance(Deployed(model).model.head, RowMeansHead)


def test_a_head_file_runs_only_if_the_caller_names_it(tmp_path: Path) -> None:
    file = tmp_path / "my_head.py"
    shutil.copy(HEAD_FILE, file)
    name = f"{file}:MeanHead"
    model = with_statistics(small_model(name))
    assert type(model.head).__name__ == "MeanHead"
    model.save_pretrained(tmp_path / "model")
    assert model.config.head == name
    file.write_text("raise RuntimeError('executed')")
    with pytest.raises(ValueError, match="which is not built in; pass its class"):
        caaseg.load_model(tmp_path / "model")
    with pytest.raises(ValueError, match="which is not built in; pass its class"):
        Segmenter(ModelConfig(head=name, num_classes=5))
    images = torch.randn(1, 3, 33, 40)
    loaded = caaseg.load_model(tmp_path / "model", head=name)
    assert torch.equal(loaded(images).logits, model(images).logits)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("gone.py:MyHead", r"gone\.py is not a file; expected a Python file with the class MyHead"),
        ("head.py:Other", r"head\.py has no subclass of caaseg\.models\.heads\.base\.Head named Other"),
        ("head.py:not_a_head", r"head\.py has no subclass of .* named not_a_head"),
        ("os:system", r"head is 'os:system'; expected one of fcn, axial, .*, or file\.py:Class"),
    ],
)
def test_files_without_the_head_are_rejected(
    head: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(HEAD_FILE, "head.py")
    with pytest.raises(ValueError, match=message):
        small_model(head)


class TwoConvolutions(nn.Module):
    """A custom backbone with all attributes of the protocol."""

    coarse_channels, fine_channels = 12, 6
    mean, std = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)

    def __init__(self) -> None:
        super().__init__()
        self.fine = nn.Sequential(nn.Conv2d(3, 6, 3, stride=4, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.coarse = nn.Conv2d(6, 12, 3, stride=4, padding=1)

    def forward(self, images: Tensor) -> Features:
        fine = self.fine(images)
        return Features(self.coarse(fine), fine)


@pytest.mark.parametrize("decoder", [False, True])
def test_a_backbone_module_is_trained_saved_and_loaded(decoder: bool, tmp_path: Path) -> None:
    model = with_statistics(small_model(backbone=TwoConvolutions(), decoder=decoder))
    assert model.config.backbone == "tests.models.test_heads:TwoConvolutions"
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"the backbone is a module of class .*:TwoConvolutions; pass a module: "):
        caaseg.load_model(tmp_path)
    loaded = caaseg.load_model(tmp_path, backbone=TwoConvolutions())
    images = torch.randn(2, 3, 41, 33)
    expected = model(images).logits
    assert torch.equal(loaded(images).logits, expected)
    with torch.no_grad():
        torch.testing.assert_close(fold_batch_norm(model)(images).logits, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(Deployed(model).model(images).logits, expected)
        fuse_batch_norm(model)
        torch.testing.assert_close(fold_batch_norm(model)(images).logits, expected, atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match=r"a module of your own .* whose output stride cannot be changed"):
        with_output_stride(model, 8)
    image = torch.randint(0, 256, (33, 40, 3), dtype=torch.uint8).numpy()
    assert caaseg.Predictor(loaded)(image).shape == (33, 40)


def test_a_module_that_is_no_backbone_is_rejected() -> None:
    with pytest.raises(ValueError, match="backbone Conv2d has no attribute coarse_channels, fine_channels, mean, std"):
        small_model(backbone=nn.Conv2d(3, 3, 1))
    backbone = TwoConvolutions()
    backbone.fine_channels = None  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"backbone TwoConvolutions has no fine features .* use decoder=False"):
        small_model(backbone=backbone, decoder=True)
    with pytest.raises(ValueError, match="pretrained is for timm backbones"):
        small_model(backbone=TwoConvolutions(), pretrained=True)
