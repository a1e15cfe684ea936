"""What is wrong with a command line, in one sentence that says what to do. The library speaks of keys and types."""

import difflib
import re
from collections.abc import Collection
from typing import Any, NoReturn

from jsonargparse import ArgumentParser

KINDS = {"int": "a whole number", "float": "a number", "bool": "true or false"}


class Parser(ArgumentParser):
    """A parser whose errors are a ValueError, for `main` to say."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise ValueError(_in_words(message, self)) from ex


def _in_words(message: str, parser: ArgumentParser) -> str:
    if found := re.fullmatch(r"the following arguments are required: (.*)", message):
        keys = [key.split(".") for key in found[1].split(", ")]  # through the commands, such as data.check.root
        parser = _below(parser, keys[0][:-1])
        names = [_called(key[-1], parser) for key in keys]
        return f"{_name(parser)} needs {' and '.join(names)}; {_see(parser)}"
    if found := re.match(r'expected "([\w.]+)" to be one of', message):
        parser = _below(parser, found[1].split(".")[:-1])
        return f"{_name(parser)} needs a command: {_either(list(_commands(parser)))}"
    if found := re.search(r"invalid choice: '(.*?)' \(choose from", message):
        known = list(_commands(parser))
        return f"{_name(parser)} has no command {found[1]!r}{_nearest(found[1], known)}; expected {_either(known)}"
    if found := re.search(r"unrecognized arguments: (\S+)", message):
        word = found[1].partition("=")[0]
        if not word.startswith("-"):
            return f"{word!r} is a word too many for {_name(parser)}; {_see(parser)}"
        return f"{_name(parser)} has no option {word}{_nearest(word, parser._option_string_actions)}; {_see(parser)}"
    if found := re.fullmatch(r"argument (\S+): expected (?:at least )?one argument", message):
        return f"{found[1]} has no value behind it; {_see(parser)}"
    if found := re.match(r'Parser key "(\w+)":.*?(?:Got value|Given value): (.*)', message, re.DOTALL):
        known, kinds = _expected(message)
        close, either = _nearest(found[2], known), _either([*known, *kinds])
        return f"{_called(found[1], parser)} is {found[2]!r}{close}; expected {either}; {_see(parser)}"
    return f"{' '.join(message.split())}; {_see(parser)}"


def _expected(message: str) -> tuple[list[str], list[str]]:
    """The words that may be given, and the kinds; that an option may also be left out goes without saying."""
    known: list[str] = []
    kinds: list[str] = []
    for kind in re.findall(r"Expected an? (.*?)(?:\. Got value|\n|$)", message):
        if kind.startswith("typing.Literal"):
            known += [word.strip(" '") for word in kind.partition("[")[2].rstrip("]").split(",")]
        elif "NoneType" not in kind:
            kinds.append(next((words for name, words in KINDS.items() if f"'{name}'" in kind), kind))
    return known, kinds


def _below(parser: ArgumentParser, commands: list[str]) -> ArgumentParser:
    for command in commands:
        parser = _commands(parser).get(command, parser)
    return parser


def _commands(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    found = (action.choices for action in parser._actions if isinstance(action.choices, dict))
    return next(found, {})


def _called(name: str, parser: ArgumentParser) -> str:
    """What a user writes: an option, or the place of a word."""
    actions: list[Any] = [action for action in parser._actions if action.dest == name and action.option_strings]
    return str(actions[0].option_strings[0]) if actions else name.upper()


def _nearest(word: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _either(known: list[str]) -> str:
    return " or ".join([", ".join(known[:-1]), known[-1]]) if len(known) > 1 else known[0]


def _see(parser: ArgumentParser) -> str:
    return f"see {_name(parser)} --help"


def _name(parser: ArgumentParser) -> str:
    return parser.prog.replace(" [options]", "")
