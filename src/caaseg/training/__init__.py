"""Training: the loop, losses, optimizers, EMA weights, checkpoints, and runs that can be killed and resumed."""
