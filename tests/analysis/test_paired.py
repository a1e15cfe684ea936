"""Paired differences against scipy, and the claims derived from them."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from caaseg.analysis.paired import Difference, paired_difference, t_quantile


@given(confidence=st.floats(0.01, 0.99999), freedom=st.integers(1, 300))
def test_quantiles_are_scipy_s(confidence: float, freedom: int) -> None:
    assert t_quantile(confidence, freedom) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9)


@given(number=st.integers(2, 12), seed=st.integers(0, 2**31), confidence=st.sampled_from([0.9, 0.95, 0.99]))
def test_intervals_are_those_of_scipy_s_paired_test(number: int, seed: int, confidence: float) -> None:
    ours, theirs = np.random.default_rng(seed).normal(0.5, 0.02, (2, number))
    found = paired_difference(ours.tolist(), theirs.tolist(), confidence)
    expected = stats.ttest_rel(ours, theirs).confidence_interval(confidence)
    assert found is not None
    assert found.pairs == number
    assert found.mean == pytest.approx((ours - theirs).mean())
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    significant = stats.ttest_rel(ours, theirs).pvalue < 1 - confidence
    assert (found.claim != "no difference shown") == significant


@pytest.mark.parametrize(
    ("difference", "claim"),
    [
        (Difference(0.02, 0.01, 0.03, 3), "higher"),
        (Difference(-0.02, -0.03, -0.01, 3), "lower"),
        (Difference(0.02, -0.01, 0.05, 3), "no difference shown"),
        (Difference(-0.02, -0.04, 0.0, 3), "no difference shown"),  # a bound of zero contains zero
        (Difference(0.02, 0.0, 0.04, 3), "no difference shown"),
        (Difference(0.3, None, None, 1), "no difference shown"),  # a single pair has no interval
    ],
)
def test_no_difference_is_claimed_if_the_interval_contains_zero(difference: Difference, claim: str) -> None:
    assert difference.claim == claim


@given(number=st.integers(2, 8), comparisons=st.integers(1, 400), seed=st.integers(0, 2**31))
def test_corrected_intervals_and_claims_are_those_of_bonferroni_s_test(
    number: int, comparisons: int, seed: int
) -> None:
    ours, theirs = np.random.default_rng(seed).normal([[0.55], [0.5]], 0.02, (2, number))
    found = paired_difference(ours.tolist(), theirs.tolist(), comparisons=comparisons)
    test = stats.ttest_rel(ours, theirs)
    expected = test.confidence_interval(1 - 0.05 / comparisons)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high))
    assert (found.claim != "no difference shown") == (test.pvalue * comparisons < 0.05)


def test_one_pair_has_no_interval_and_no_pairs_have_no_difference() -> None:
    found = paired_difference([0.75], [0.25])
    assert found == Difference(0.5, None, None, 1)
    assert paired_difference([], []) is None
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        paired_difference([0.1, 0.2], [0.1])


def test_pairing_detects_a_difference_smaller_than_the_std_over_seeds() -> None:
    """The scores vary much between seeds, but their differences do not."""
    found = paired_difference([0.51, 0.61, 0.711], [0.50, 0.60, 0.70])
    assert found is not None
    assert found.claim == "higher"


@pytest.mark.parametrize(("confidence", "freedom"), [(0.0, 3), (1.0, 3), (math.nan, 3), (0.95, 0)])
def test_invalid_confidence_or_freedom_is_rejected(confidence: float, freedom: int) -> None:
    with pytest.raises(ValueError, match="expected a confidence between 0 and 1 and a freedom of 1 or more"):
        t_quantile(confidence, freedom)
