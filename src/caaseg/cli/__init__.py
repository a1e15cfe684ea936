"""The command `caaseg`: its words to one typed function of `commands`, its errors to one message."""

import sys
import traceback
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from docstring_parser import parse as docstring
from jsonargparse import ArgumentParser, Namespace

from caaseg import __version__
from caaseg.cli.app import open_app
from caaseg.cli.benchmark import (
    benchmark_attention,
    benchmark_evaluation,
    benchmark_loader,
    benchmark_model,
    flops,
)
from caaseg.cli.compare import compare_models
from caaseg.cli.conflicts import conflicts
from caaseg.cli.data import data_check, data_list, data_prepare, data_show
from caaseg.cli.demo import demo
from caaseg.cli.evaluate import evaluate_model
from caaseg.cli.export import export_to_file
from caaseg.cli.parser import Parser
from caaseg.cli.predict import predict_pictures_with
from caaseg.cli.reproduce import reproduce
from caaseg.cli.terminal import COMMAND_LINE
from caaseg.cli.train import recipes, train_by_recipe
from caaseg.recipes import add_recipe_arguments, split_overrides

Command = Callable[..., int]

COMMANDS: dict[str, Command | dict[str, Command]] = {
    "demo": demo,
    "evaluate": evaluate_model,
    "predict": predict_pictures_with,
    "export": export_to_file,
    "compare": compare_models,
    "conflicts": conflicts,
    "app": open_app,
    "recipes": recipes,
    "train": train_by_recipe,  # named train, it would have jsonargparse look at, and import, caaseg.train
    "reproduce": reproduce,
    "flops": flops,
    "data": {"list": data_list, "prepare": data_prepare, "check": data_check, "show": data_show},
    "benchmark": {
        "attention": benchmark_attention,
        "model": benchmark_model,
        "loader": benchmark_loader,
        "evaluation": benchmark_evaluation,
    },
}
GOES_ON = ("demo", "predict")
"""Commands that keep what they have done when they are interrupted, and say nothing of it themselves."""

LISTS = (list[str], list[str] | None)
GROUP_HELP = {"data": "Get, convert, check and see datasets.", "benchmark": "Measure speed and memory."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input ends with exit code 2 and one message; --debug, anywhere, shows the traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    COMMAND_LINE[:] = words
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    try:
        overrides: list[str] = []
        explained = bool({"-h", "--help"} & set(words))
        command = COMMANDS.get(words[0]) if words else None
        if callable(command) and _takes_overrides(command) and not explained:
            words, overrides = split_overrides(words, own=signature(command).parameters)
        parsed = _parser(explained).parse_args(words)
        if overrides:
            parsed[parsed["command"]]["overrides"] = overrides
        return _call(COMMANDS, parsed)
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not _is_out_of_memory(error):
            raise
        if debug:
            traceback.print_exc()
        if isinstance(error, PermissionError) and error.filename is not None:
            error = PermissionError(
                f"{error.filename}: permission denied; give another place, or change who may use it"
            )
        print(f"caaseg: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = "; the same command goes on" if words[0] in GOES_ON else ""
        print(f"caaseg: interrupted{goes_on}", file=sys.stderr)
        return 130


def _parser(explained: bool) -> ArgumentParser:
    parser = Parser(
        prog="caaseg",
        description="Semantic segmentation with Channelized Axial Attention.",
        epilog="A word --debug, anywhere, shows the traceback of an error.",
        version=__version__,
    )
    _add_commands(parser, COMMANDS, explained)
    return parser


def _add_commands(parser: ArgumentParser, commands: dict[str, Any], explained: bool) -> None:
    children = parser.add_subcommands(required=True, dest="command", metavar="COMMAND")
    for name, command in commands.items():
        text = GROUP_HELP[name] if isinstance(command, dict) else (command.__doc__ or "").split("Args:")[0].strip()
        child = Parser(description=text)
        children.add_subcommand(name, child, help=text.split("\n")[0])
        if isinstance(command, dict):
            _add_commands(child, command, explained)
        else:
            # Keyword-only parameters are options, and a list is one word or more; or none, where it may be None.
            kinds = {name: given.annotation for name, given in signature(command).parameters.items()}
            lists = {name: "+" if kind == list[str] else "*" for name, kind in kinds.items() if kind in LISTS}
            child.add_function_arguments(command, as_group=False, as_positional=True, skip={"overrides", *lists})
            for name, number in lists.items():
                child.add_argument(name, nargs=number, type=str, metavar=name, help=_explained(command, name))
            if explained and _takes_overrides(command):
                add_recipe_arguments(child)
            _make_customary(child)


def _explained(command: Command, parameter: str) -> str:
    return next((p.description or "" for p in docstring(command.__doc__ or "").params if p.arg_name == parameter), "")


def _takes_overrides(command: Command) -> bool:
    """Whether every value of a recipe is an option of the command too."""
    return "overrides" in signature(command).parameters


def _make_customary(parser: ArgumentParser) -> None:
    """Offer --output-stride for the parameter output_stride, and a plain --paper for --paper true."""
    for action in parser._actions:
        if action.default is False:
            action.nargs, action.const = "?", True
        action.option_strings = [name.replace("_", "-") for name in action.option_strings]
        parser._option_string_actions.update(dict.fromkeys(action.option_strings, action))


def _call(commands: dict[str, Any], parsed: Namespace) -> int:
    name = parsed["command"]
    command, options = commands[name], parsed[name]
    return _call(command, options) if isinstance(command, dict) else int(command(**options.as_dict()))


def _is_out_of_memory(error: RuntimeError) -> bool:
    from caaseg.models.inference import is_out_of_memory

    return is_out_of_memory(error)
