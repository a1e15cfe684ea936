"""Pixel attention against gradients and against the model itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from caaseg.analysis.pixel_attention import (
    AxialMaps,
    PixelAttention,
    axial_reach,
    most_attended,
    nearest_cell,
    predict_with_attention,
    weight_per_class,
)
from caaseg.attention import axial_attention
from caaseg.attention.axial import column_weights, row_weights
from caaseg.models.predictor import Predictor
from tests.analysis.study_models import model_with

sizes = st.integers(min_value=1, max_value=6)


def image_of(height: int = 72, width: int = 104) -> torch.Tensor:
    return torch.randint(0, 256, (3, height, width), generator=torch.Generator().manual_seed(7), dtype=torch.uint8)


@given(height=sizes, width=sizes, data=st.data(), seed=st.integers(0, 2**31))
def test_reach_is_the_gradient_of_the_ungated_output_with_respect_to_the_values(
    height: int, width: int, data: st.DataObject, seed: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    by_column, by_row = (torch.randn(1, 3, height, width, generator=rng, dtype=torch.float64) for _ in range(2))
    values = torch.randn(1, 2, height, width, generator=rng, dtype=torch.float64, requires_grad=True)
    i, j = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))

    out = axial_attention(by_column, by_row, values)
    (gradient,) = torch.autograd.grad(out[0, 1, i, j], values)

    reach = axial_reach(column_weights(by_column)[0], row_weights(by_row)[0], (i, j))
    torch.testing.assert_close(reach, gradient[0, 1])
    assert not gradient[0, 0].any()  # channels do not mix


@pytest.mark.parametrize("head", ["axial", "axial_se", "caa", "self_attention", "channelized_self_attention"])
def test_reach_and_gates_reproduce_the_output_of_the_block(head: str) -> None:
    model, image, pixel = model_with(head), image_of(), (50, 20)
    prediction = predict_with_attention(model, image)
    attention = prediction.at(pixel)
    assert attention is not None
    assert attention.cell == (6, 2)

    block = model.head.attention_block()
    assert block is not None
    given: list[torch.Tensor] = []
    projected: list[torch.Tensor] = []
    block.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    with block.values.register_forward_hook(lambda _, inputs, output: projected.append(output)):
        Predictor(model)(image.permute(1, 2, 0).numpy())
    features = given[0].clone()
    values = projected[0].clone()[0]  # (C, H, W)
    with torch.no_grad():
        result = block(features)[0, :, 6, 2]

    expected = (attention.reach * values).sum((1, 2)) * (1 if attention.gates is None else attention.gates)
    torch.testing.assert_close(expected, result)
    assert (attention.gates is None) == (head in ("axial", "axial_se", "self_attention"))


def test_column_row_and_reach_are_consistent() -> None:
    attention = predict_with_attention(model_with("caa"), image_of()).at((71, 103))
    assert attention is not None
    assert attention.column is not None
    assert attention.row is not None
    assert attention.cell == (8, 12)
    assert (len(attention.column), len(attention.row), attention.reach.shape) == (9, 13, (9, 13))
    for weights in (attention.column, attention.row, attention.reach):
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
    torch.testing.assert_close(attention.reach.sum(0), attention.row)  # column sums are the weights along the row
    torch.testing.assert_close(attention.reach[:, 12], attention.row[12] * attention.column)


def test_labels_equal_the_predictor_s_and_attention_differs_between_pixels() -> None:
    model, image = model_with("caa"), image_of()
    prediction = predict_with_attention(model, image)
    assert (prediction.labels.numpy() == Predictor(model)(image.permute(1, 2, 0).numpy())).all()
    assert isinstance(prediction.maps, AxialMaps)
    first, second = prediction.at((0, 0)), prediction.at((40, 60))
    assert first is not None
    assert second is not None
    assert not torch.equal(first.reach, second.reach)
    assert not list(model.head.attention_block()._forward_pre_hooks)  # type: ignore[union-attr]


@pytest.mark.parametrize("head", ["fcn", "danet"])
def test_heads_without_pixel_attention_return_labels_only(head: str) -> None:
    prediction = predict_with_attention(model_with(head), image_of())
    assert prediction.labels.shape == (72, 104)
    assert prediction.at((0, 0)) is None


def test_a_pixel_belongs_to_the_nearest_cell_with_aligned_corners() -> None:
    assert nearest_cell((0, 0), (65, 33), (9, 5)) == (0, 0)
    assert nearest_cell((64, 32), (65, 33), (9, 5)) == (8, 4)
    assert nearest_cell((3, 5), (65, 33), (9, 5)) == (0, 1)
    assert nearest_cell((0, 7), (1, 8), (1, 1)) == (0, 0)
    with pytest.raises(ValueError, match="column 33 is outside the image; expected 0 to 32"):
        nearest_cell((0, 33), (65, 33), (9, 5))


def test_attention_is_computed_at_the_size_at_which_the_image_is_predicted() -> None:
    model, image = model_with("caa"), image_of()
    found = predict_with_attention(model, image, size=48)
    assert (found.labels.numpy() == model.predict(image, size=48).labels).all()
    assert found.predicted_size == (48, 69)
    corner = found.at((71, 103))
    assert corner is not None
    assert corner.reach.shape == (6, 9)
    assert corner.cell == (5, 8)
    rows, columns = found.cell_centers()
    assert (rows[0].item(), rows[-1].item()) == (0.75, 71.25)  # centers of the first and last of 48 rows, times 1.5
    for k, row in enumerate(rows.tolist()):
        for j, column in enumerate(columns.tolist()):
            at = found.at((int(row), int(column)))
            assert at is not None
            assert at.cell == (k, j)
    assert found.cell_labels().shape == (6, 9)


def test_heads_without_attention_and_images_in_windows_give_a_reason() -> None:
    model, image = model_with("fcn"), image_of()
    assert predict_with_attention(model, image).without_maps == model.head.without_attention
    tiled = predict_with_attention(model_with("caa"), image_of(16, 24), size=(2049, 2049))
    assert tiled.maps is None
    assert tiled.without_maps.startswith("The image was predicted in windows")


def test_the_most_attended_places_are_apart_and_have_the_class_with_the_largest_weight() -> None:
    reach = torch.full((24, 36), 0.0)
    reach[2, 3] = 0.5  # the pixel itself
    reach[20, 30], reach[20, 31], reach[21, 31] = 0.1, 0.15, 0.05
    reach[5, 20] = 0.2
    labels = torch.zeros(24, 36, dtype=torch.uint8)
    labels[20:, 31] = 2
    own, places = most_attended(PixelAttention((2, 3), None, None, reach, None), labels)
    assert own == pytest.approx(0.5)
    assert [(place.cell, place.label) for place in places] == [((20, 31), 2), ((5, 20), 0)]
    assert [place.weight for place in places] == pytest.approx([0.3, 0.2])
    assert weight_per_class(reach, labels).tolist() == pytest.approx([0.8, 0, 0.2])
