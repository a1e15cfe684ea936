"""Commands that end badly, for the tests of `main`."""


def interrupted() -> int:
    """Be interrupted by Ctrl-C."""
    raise KeyboardInterrupt


def not_permitted() -> int:
    """Find a file that must not be written."""
    raise PermissionError(13, "Permission denied", "locked/table.md")


def broken() -> int:
    """Have a bug."""
    raise KeyError("a bug")
