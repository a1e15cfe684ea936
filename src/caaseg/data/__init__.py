"""Datasets, decoding, augmentation and loaders."""
