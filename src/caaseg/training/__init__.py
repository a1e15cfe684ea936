"""Training: the loss, the schedule, the journey of a batch, and runs that can be killed and resumed."""
