"""Normalisations folded into convolutions: the same numbers, and nothing left to fold."""

import pytest
import torch
from torch import nn

import caaseg
from caaseg.models.folding import folded

SMALL = {"num_classes": 4, "channels": 12, "key_channels": 4, "gate_width": 8}


def norms(model: nn.Module) -> list[nn.BatchNorm2d]:
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("head", "backbone", "options"),
    [
        ("caa", "test_resnet", {"aux": True, "decoder": True}),
        ("danet", "test_efficientnet", {}),  # whose normalisations have activations in them
        ("axial_se", "resnet18", {"resnet_variant": "authors"}),
        ("fcn", "test_resnet", {"enlarge": 1.5}),
    ],
)
def test_a_folded_model_gives_the_same_numbers(head: str, backbone: str, options: dict[str, object]) -> None:
    model = caaseg.create_model(head, backbone=backbone, **SMALL, **options).double()  # type: ignore[arg-type]
    for norm in norms(model):
        assert norm.running_mean is not None
        assert norm.running_var is not None
        nn.init.normal_(norm.running_mean, 0, 0.1)
        nn.init.uniform_(norm.running_var, 0.5, 1.5)
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.bias, 0, 0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    served = folded(model)
    images = torch.randn(2, 3, 40, 51, dtype=torch.float64)
    model.eval()
    with torch.no_grad():
        expected, found = model(images), served(images)
    torch.testing.assert_close(found.logits, expected.logits)
    for name, logits in expected.branches.items():
        torch.testing.assert_close(found.branches[name], logits)
    assert len(norms(model)) > 3
    assert not norms(served)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())  # a copy was folded
