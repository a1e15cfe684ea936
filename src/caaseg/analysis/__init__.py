"""Studies of trained models: conflicts, comparison, pixel attention, FLOPs, paired statistics."""
