"""Evaluation: metrics, the scoring loop, best and worst images."""
