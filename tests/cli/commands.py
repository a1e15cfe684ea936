"""Commands that end badly, for the tests of `main`."""

from caaseg.errors import CaasegError


def interrupted() -> int:
    """Be interrupted by Ctrl-C."""
    raise KeyboardInterrupt


def not_permitted() -> int:
    """Find a file that must not be written."""
    raise PermissionError(13, "Permission denied", "locked/table.md")


def bad_name() -> int:
    """Find no file of a name with control characters."""
    raise CaasegError("a\nb\x1b[2J.png: no such file")


def broken() -> int:
    """Have a bug."""
    raise KeyError("a bug")
