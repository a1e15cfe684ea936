"""Whether one thing scored higher than another: paired differences over seeds, with what they can and cannot show."""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import Literal, NamedTuple

CONFIDENCE = 0.95

Claim = Literal["higher", "lower", "no difference shown"]


class Difference(NamedTuple):
    """The mean of paired differences, and the interval that holds the true one with the confidence asked for."""

    mean: float
    low: float | None  # None, as high, where one pair tells nothing of how pairs scatter
    high: float | None
    pairs: int

    @property
    def claim(self) -> Claim:
        """What the interval shows: nothing where it holds zero, or where there is none."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return "no difference shown"
        return "higher" if self.low > 0 else "lower"


def paired_difference(
    scores: Sequence[float], baseline: Sequence[float], confidence: float = CONFIDENCE
) -> Difference | None:
    """How much higher scores are than a baseline's, seed by seed; None without a pair.

    The interval is Student's, of the differences: it takes them to scatter normally, seeds to be independent.

    Args:
        scores: one a seed.
        baseline: of the same seeds, in the same order.
        confidence: of the interval.
    """
    differences = [ours - theirs for ours, theirs in zip(scores, baseline, strict=True)]
    number = len(differences)
    if number == 0:
        return None
    mean = fmean(differences)
    if number == 1:
        return Difference(mean, None, None, 1)
    half = t_quantile(confidence, number - 1) * stdev(differences) / math.sqrt(number)
    return Difference(mean, mean - half, mean + half, number)


def t_quantile(confidence: float, freedom: int) -> float:
    """The t within which, on both sides of 0, Student's distribution has this share.

    The share within t is a finite sum in the angle atan(t / sqrt(freedom)) for whole degrees of freedom (Abramowitz and
    Stegun, 26.7.3 and 26.7.4); it rises with the angle, which is found by halving.
    """
    if not 0 < confidence < 1 or freedom < 1:
        raise ValueError(
            f"confidence is {confidence} and freedom {freedom}; expected a share between 0 and 1, and 1 or more"
        )
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # as far as doubles go
        middle = (low + high) / 2
        low, high = (middle, high) if _share_within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _share_within(angle: float, freedom: int) -> float:
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = 0.0 if freedom == 1 else term
    for k in range(2 + odd, freedom - 1, 2):  # each term has two more powers of the cosine than the one before
        term *= cosine**2 * (k - 1) / k
        total += term
    return (angle + sine * total) * 2 / math.pi if odd else sine * total
