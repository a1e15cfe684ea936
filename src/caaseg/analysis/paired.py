"""Paired differences of scores over seeds, with Student's t confidence intervals, corrected for several comparisons."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

CONFIDENCE = 0.95

Claim = Literal["higher", "lower", "no difference shown"]


class Difference(NamedTuple):
    """Mean of paired differences with its confidence interval."""

    mean: float
    low: float | None  # None, like high, for a single pair
    high: float | None
    pairs: int

    @property
    def claim(self) -> Claim:
        """Sign of the difference if the interval excludes zero; otherwise, or without an interval, no difference."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "no difference shown"
        return "higher" if self.low > 0 else "lower"


def paired_difference(
    scores: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE, *, comparisons: int = 1
) -> Difference | None:
    """Return the mean difference of scores to a baseline, paired by seed, or None without pairs.

    The interval assumes normally distributed differences and independent seeds. For several comparisons it is
    corrected (Bonferroni): with probability `confidence` or more, all intervals contain their true differences.

    Args:
        scores: one score per seed.
        baseline: scores of the baseline for the same seeds, in the same order.
        confidence: confidence level of the interval, or of all intervals together.
        comparisons: number of comparisons that the interval is corrected for.
    """
    differences = [ours - theirs for ours, theirs in zip(scores, baseline, strict=True)]
    pairs = len(differences)
    if pairs == 0:
        return None
    mean = fmean(differences)
    if pairs == 1:
        return Difference(mean, None, None, 1)
    half = t_quantile(1 - (1 - confidence) / comparisons, pairs - 1) * stdev(differences) / math.sqrt(pairs)
    return Difference(mean, mean - half, mean + half, pairs)


def t_quantile(confidence: float, freedom: int) -> float:
    """Return t such that Student's distribution has probability `confidence` between -t and t.

    For integer degrees of freedom this probability is a finite sum in the angle atan(t / sqrt(freedom)) (Abramowitz and
    Stegun, 26.7.3 and 26.7.4). It increases with the angle, which is found by bisection.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(
            f"confidence is {confidence} and freedom is {freedom}; expected a confidence between 0 and 1 and "
            "a freedom of 1 or more"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # double precision
        middle = (low + high) / 2
        low, high = (middle, high) if _probability(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _probability(angle: float, freedom: int) -> float:
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
