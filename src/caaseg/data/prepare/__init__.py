"""Download, unpack, convert and check datasets."""

from collections.abc import Callable

Progress = Callable[[str, int, int | None], None]
"""Callback with the current step, the amount done, and the total if known."""
