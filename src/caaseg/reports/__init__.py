"""Tables and figures of what the other stages return."""
