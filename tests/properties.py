"""Numbers of examples of the property tests."""

from hypothesis import settings

EXAMPLES = 25
"""Examples per test, without --explore."""
EXPLORE_FACTOR = 10


def examples(number: int) -> settings:
    """Return settings for a test with this number of examples, multiplied by EXPLORE_FACTOR with --explore."""
    return settings(max_examples=number * settings().max_examples // EXAMPLES)
