"""Scoring, counting and measuring."""
