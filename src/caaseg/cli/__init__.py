"""The command `caaseg`: finds the function of a command and parses its options."""

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from inspect import Parameter, signature
from pkgutil import resolve_name
from typing import Annotated, Any

import tyro
from pydantic import create_model

import caaseg
from caaseg.cli.exit_codes import exit_code
from caaseg.cli.terminal import COMMAND_LINE
from caaseg.config import Recipe
from caaseg.errors import CaasegError
from caaseg.recipes import load_recipe
from caaseg.settings import Settings, did_you_mean, flat_fields, read_text, spelled, split_options

COMMANDS = {
    "caaseg": "demo evaluate predict export convert compare conflicts app recipes train reproduce models flops data "
    "benchmark",
    "caaseg data": "list init import prepare check show",
    "caaseg benchmark": "attention model heads cpu loader evaluation train all",
}
"""`caaseg data list` is the function `data_list` of the module `caaseg.cli.data`, imported when the command is used."""


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for bad input, 1 for a bug. --debug shows the traceback of both."""
    COMMAND_LINE[:] = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        function, values = parse([argument for argument in COMMAND_LINE if argument != "--debug"])
        return function(**values)

    return exit_code(run, COMMAND_LINE)


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
    inputs, texts = split_options(arguments, fields | recipe_fields)
    overrides = [f"{spelled(key)}={texts.pop(key)}" for key in recipe_fields if key in texts]
    values: dict[str, Any] = {"overrides": overrides} if overrides else {}
    values |= {key: read_text(text, fields[key]) for key, text in texts.items()}
    for name in positional[: len(inputs)]:
        values[name], inputs = (inputs, []) if fields[name].annotation == list[str] else (inputs[0], inputs[1:])
    if inputs:
        raise CaasegError(f"unexpected argument {inputs[0]!r}")
    return dict(model.read(values, write=lambda key: key.upper() if key in positional else spelled(key)))


def _function(prog: str) -> Callable[..., int]:
    return resolve_name(f"caaseg.cli.{prog.split()[1]}:{'_'.join(prog.split()[1:])}")  # type: ignore[no-any-return]


def _list_commands(prog: str) -> str:
    lines = [f"usage: {prog} COMMAND [OPTIONS]\n\n{caaseg.__doc__ or ''}\n\ncommands:"]
    for name in COMMANDS[prog].split():
        text = COMMANDS.get(f"{prog} {name}") or _function(f"{prog} {name}").__doc__ or ""
        lines.append(f"  {name:12}{text.partition(chr(10))[0]}")
    return "\n".join([*lines, f"\n{prog} COMMAND --help shows its options. --debug shows the traceback of an error."])
