"""The command `caaseg`: finds the function of a command, parses its options and prints errors as one message."""

import sys
import traceback
from collections.abc import Callable, Sequence
from inspect import signature
from pkgutil import resolve_name
from typing import Any

from caaseg import __version__
from caaseg.cli.terminal import COMMAND_LINE
from caaseg.errors import CaasegError
from caaseg.settings import did_you_mean, either

COMMANDS: dict[str, str | dict[str, str]] = {
    "demo": "caaseg.cli.demo:demo",
    "evaluate": "caaseg.cli.evaluate:evaluate_model",
    "predict": "caaseg.cli.predict:predict_images",
    "export": "caaseg.cli.export:export_to_file",
    "compare": "caaseg.cli.compare:compare_models",
    "conflicts": "caaseg.cli.conflicts:conflicts",
    "app": "caaseg.cli.app:open_app",
    "recipes": "caaseg.cli.recipes:recipes",
    "train": "caaseg.cli.train:train_recipe",
    "reproduce": "caaseg.cli.reproduce:reproduce",
    "flops": "caaseg.cli.flops:flops",
    "data": {name: f"caaseg.cli.data:data_{name}" for name in ("list", "prepare", "check", "show")},
    "benchmark": {
        name: f"caaseg.cli.benchmark:benchmark_{name}" for name in ("attention", "model", "loader", "evaluation")
    },
}
"""Command -> "module:function", imported when the command is used."""
GROUPS = {"data": "Download, convert, check and show datasets.", "benchmark": "Measure speed and memory."}
RESUMABLE = ("demo", "predict")
"""Commands that keep finished work when interrupted."""
USER_ERRORS = (CaasegError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 with one message for bad input, 1 with a traceback for a bug.

    The option --debug, anywhere, shows the traceback of bad input too.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    COMMAND_LINE[:] = words
    debug = "--debug" in words
    try:
        function, options = parse([word for word in words if word != "--debug"])
        return function(**options)
    except KeyboardInterrupt:
        resumable = "; run the same command to continue" if words[0] in RESUMABLE else ""
        print(f"caaseg: interrupted{resumable}", file=sys.stderr)
        return 130
    except Exception as error:
        is_bug = not isinstance(error, USER_ERRORS) and not _is_out_of_memory(error)
        if debug or is_bug:
            traceback.print_exc()
        if is_bug:
            print("caaseg: this is a bug; please report it with the traceback above", file=sys.stderr)
            return 1
        message = str(error)
        if isinstance(error, PermissionError) and error.filename is not None:
            message = f"{error.filename}: permission denied; choose another path, or change its permissions"
        print(f"caaseg: {message}", file=sys.stderr)
        return 2


def parse(words: Sequence[str]) -> tuple[Callable[..., int], dict[str, Any]]:
    """Return the function of a command line and its validated arguments. With --help, print help and exit."""
    if words and words[0] == "--version":
        print(f"caaseg {__version__}")
        sys.exit(0)
    found: str | dict[str, str] = COMMANDS  # type: ignore[assignment]
    prog, rest = "caaseg", ["--help" if word == "-h" else word for word in words]
    while isinstance(found, dict):
        if rest and rest[0] in found:
            found, prog = found[rest[0]], f"{prog} {rest.pop(0)}"
        elif rest and rest[0] == "--help":
            _print_commands(prog, found)
            sys.exit(0)
        elif rest:
            hint = did_you_mean(rest[0], found)
            raise CaasegError(f"{prog} has no command {rest[0]!r}; expected {either(found)}{hint}")
        else:
            raise CaasegError(f"{prog} needs a command: {either(found)}")
    function: Callable[..., int] = resolve_name(found)
    return function, _parse_options(function, rest, prog)


def _parse_options(function: Callable[..., int], words: list[str], prog: str) -> dict[str, Any]:
    from caaseg.config import Recipe
    from caaseg.options import attach_values, parse_options, settings_of, spelled
    from caaseg.settings import flat_fields

    model, recipe_keys = settings_of(function), flat_fields(Recipe)
    takes_recipe = "overrides" in signature(function).parameters
    if "--help" in words:
        described = settings_of(function, *([Recipe] if takes_recipe else []))
        shown = described.model_construct(**(_recipe_values(words) if takes_recipe else {}))
        text = (function.__doc__ or "").partition("Args:")[0].strip()
        parse_options(described, ["--help"], prog=prog, description=text, default=shown)
    positional = {name for name, field in model.model_fields.items() if field.json_schema_extra}
    names = {key: key.upper() if key in positional else spelled(key) for key in model.names()}
    try:
        tokens = attach_values(words, flat_fields(model) | (recipe_keys if takes_recipe else {}))
        overrides = [token for token in tokens if takes_recipe and _key(token) in recipe_keys]
        given = parse_options(model, [token for token in tokens if token not in overrides])
        missing = [names[key] for key, field in model.model_fields.items() if field.is_required() and key not in given]
        if missing:
            raise CaasegError(f"{prog} needs {' and '.join(missing)}")
    except CaasegError as error:
        raise CaasegError(f"{error}{'' if str(error).endswith('?') else f'; see {prog} --help'}") from error
    return dict(model.read(given, write=lambda key: names[key])) | ({"overrides": overrides} if takes_recipe else {})


def _key(token: str) -> str | None:
    return token[2:].partition("=")[0].replace("-", "_") if token.startswith("--") else None


def _recipe_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of the first recipe that a command line names, for its help."""
    from caaseg.recipes import load_recipe

    for word in words:
        try:
            return dict(load_recipe(word))
        except CaasegError:
            continue
    return {}


def _print_commands(prog: str, commands: dict[str, Any]) -> None:
    title = GROUPS.get(prog.removeprefix("caaseg "), "Semantic segmentation with Channelized Axial Attention.")
    print(f"usage: {prog} COMMAND [OPTIONS]\n\n{title}\n\ncommands:")
    for name, command in commands.items():
        text = GROUPS[name] if isinstance(command, dict) else (resolve_name(command).__doc__ or "").split("\n")[0]
        print(f"  {name:12}{text}")
    print(f"\n{prog} COMMAND --help shows the options of a command. --debug shows the traceback of an error.")


def _is_out_of_memory(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    from caaseg.models.inference import is_out_of_memory

    return is_out_of_memory(error)
