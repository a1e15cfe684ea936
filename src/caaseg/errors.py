"""Errors that users can correct."""


class CaasegError(ValueError):
    """Bad input: the message says where, what was found, what was expected and what to do.

    The command line prints the message without a traceback. Any other exception is a bug.
    """
