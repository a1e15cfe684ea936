"""Studies of trained models: conflicts, comparisons, attention, FLOPs, statistics."""
