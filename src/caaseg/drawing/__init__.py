"""Overlays, legends, figures and label files, shared by results, reports and the app."""
