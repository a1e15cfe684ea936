"""The command `caaseg`: finds the function of a command, parses its options and prints errors as one message."""

import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import Parameter, signature
from pkgutil import resolve_name
from types import FrameType
from typing import Annotated, Any

import tyro
from pydantic import create_model

import caaseg
from caaseg.cli.terminal import COMMAND_LINE, printable
from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.recipes import load_recipe
from caaseg.settings import Settings, did_you_mean, flat_fields, read_text, spelled, split_options

COMMANDS = {
    "caaseg": "demo evaluate predict export convert compare conflicts app recipes train reproduce flops data benchmark",
    "caaseg data": "list init import prepare check show",
    "caaseg benchmark": "attention model loader evaluation",
}
"""`caaseg data list` is the function `data_list` of the module `caaseg.cli.data`, imported when the command is used."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for bad input, 1 for a bug. --debug shows the traceback of both."""
    COMMAND_LINE[:] = sys.argv[1:] if arguments is None else arguments
    try:
        with ending_signals(), thread_errors():
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, io.TextIOWrapper):  # characters that the terminal's encoding does not have
                    stream.reconfigure(errors="backslashreplace")
            function, values = parse([argument for argument in COMMAND_LINE if argument != "--debug"])
            code = function(**values)
            if sys.stdout is not None:  # closed by the shell
                sys.stdout.flush()
            return code
    except KeyboardInterrupt:
        resumable = "; run the same command to continue" if COMMAND_LINE[0] in ("demo", "predict") else ""
        print(f"caaseg: interrupted{resumable}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # Python writes the rest of its buffer at the end
        return 141  # as shells report a command that SIGPIPE ended
    except Exception as error:
        is_bug, lost_worker = not isinstance(error, CaasegError | OSError | MemoryError), False
        if isinstance(error, RuntimeError):
            lost_worker = resolve_name("caaseg.data.loader:is_lost_worker")(error)
            is_bug = not lost_worker and not resolve_name("caaseg.models.inference:is_out_of_memory")(error)
        if is_bug or "--debug" in COMMAND_LINE:
            traceback.print_exc()
        message = "this is a bug; please report it with the traceback above" if is_bug else str(error)
        if lost_worker:
            message = f"{error}; if the memory was full, use fewer workers; training continues with --resume auto"
        if isinstance(error, PermissionError) and error.filename is not None:
            message = f"{error.filename}: permission denied; choose another path, or change its permissions"
        print(f"caaseg: {printable(message)}", file=sys.stderr)
        return 1 if is_bug else 2


@contextmanager
def ending_signals() -> Iterator[None]:
    """Raise SystemExit at SIGTERM and SIGHUP, so that temporary files are deleted. Ignored signals stay ignored."""

    def end(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in signal.Signals if number.name in ("SIGTERM", "SIGHUP")]  # Windows has no SIGHUP
    is_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
    changed = [number for number in numbers if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in changed:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in changed:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def thread_errors() -> Iterator[None]:
    """Print no traceback if a thread fails to write: TensorBoard raises the error again in the main thread."""
    before = threading.excepthook
    threading.excepthook = lambda thread: None if isinstance(thread.exc_value, OSError) else before(thread)
    try:
        yield
    finally:
        threading.excepthook = before


def parse(arguments: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """Return the function of a command line and its validated arguments. With --help, print help and exit."""
    prog, rest = "caaseg", ["--help" if argument == "-h" else argument for argument in arguments]
    while prog in COMMANDS:
        known, command = COMMANDS[prog].split(), rest.pop(0) if rest else ""
        if command in ("--help", "--version"):
            print(f"caaseg {caaseg.__version__}" if command == "--version" else _list_commands(prog))
            sys.exit(0)
        if command not in known:
            found = f"has no command {command!r}; expected" if command else "needs a command:"
            raise CaasegError(f"{prog} {found} {', '.join(known)}{did_you_mean(command, known)}")
        prog = f"{prog} {command}"
    try:
        return _function(prog), _parse_options(_function(prog), rest, prog)
    except CaasegError as error:
        is_clear = "; expected" in str(error) or str(error).endswith("?")
        raise error if is_clear else CaasegError(f"{error}; see {prog} --help") from error


def _parse_options(function: Callable[..., int], arguments: Sequence[str], prog: str) -> dict[str, Any]:
    parameters, types = signature(function).parameters, dict[str, Any]()
    positional = [name for name, one in parameters.items() if one.kind is not Parameter.KEYWORD_ONLY]
    recipe_fields = flat_fields(Recipe) if "overrides" in parameters else {}
    for name, one in parameters.items():
        marks = (tyro.conf.Positional, tyro.conf.arg(metavar=name.upper()))
        default = ... if one.default is Parameter.empty else one.default
        types[name] = (Annotated[one.annotation, *marks] if name in positional else one.annotation, default)
    base = Recipe if recipe_fields and "--help" in arguments else Settings
    with warnings.catch_warnings(action="ignore"):  # --json is the name of a deprecated method of pydantic
        model = create_model(prog, __base__=base, __doc__=function.__doc__, **types)
    if "--help" in arguments:
        shown_values = model.model_construct()
        with suppress(CaasegError):
            shown_values = model.model_construct(**dict(load_recipe(arguments[0])))
        tyro.cli(model, args=["--help"], prog=prog, default=shown_values, config=(tyro.conf.FlagConversionOff,))
    fields = flat_fields(model)
    words, texts = split_options(arguments, fields | recipe_fields)
    overrides = [f"{spelled(key)}={texts.pop(key)}" for key in recipe_fields if key in texts]
    values: dict[str, Any] = {"overrides": overrides} if overrides else {}
    values |= {key: read_text(text, fields[key]) for key, text in texts.items()}
    for name in positional[: len(words)]:
        values[name], words = (words, []) if fields[name].annotation == list[str] else (words[0], words[1:])
    if words:
        raise CaasegError(f"unexpected argument {words[0]!r}")
    return dict(model.read(values, write=lambda key: key.upper() if key in positional else spelled(key)))


def _function(prog: str) -> Callable[..., int]:
    return resolve_name(f"caaseg.cli.{prog.split()[1]}:{'_'.join(prog.split()[1:])}")  # type: ignore[no-any-return]


def _list_commands(prog: str) -> str:
    lines = [f"usage: {prog} COMMAND [OPTIONS]\n\n{caaseg.__doc__ or ''}\n\ncommands:"]
    for name in COMMANDS[prog].split():
        text = COMMANDS.get(f"{prog} {name}") or _function(f"{prog} {name}").__doc__ or ""
        lines.append(f"  {name:12}{text.partition(chr(10))[0]}")
    return "\n".join([*lines, f"\n{prog} COMMAND --help shows its options. --debug shows the traceback of an error."])
