"""Semantic segmentation with Channelized Axial Attention."""

__version__ = "0.1.0"
