"""Reports the failure of a command: one line on standard error, as text or JSON, and an exit code.

The exit code is 2 for a user error and 1 for a failure of the engine.
"""

from __future__ import annotations

import argparse
import copy
import difflib
import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from slipstream.base.errors import EngineClosed, EngineDead, InvalidOption, SlipstreamError
from slipstream.base.log import FORMAT, set_up_log
from slipstream.config.options import Options
from slipstream.serve.cli.elsewhere import flag_hint
from slipstream.serve.cli.flags import COMMON, LONG_GROUPS, SAMPLING
from slipstream.serve.http.server.errors import Flags
from slipstream.serve.http.server.settings import ServerSettings

log = logging.getLogger("slipstream.status")


def print_failure(error: BaseException, *, as_json: bool = False) -> int:
    """Writes the line and returns the exit code."""
    text = one_line(error)
    if as_json:
        set_up_log("error", "json")
        log.critical("%s", text, exc_info=None if isinstance(error, SlipstreamError) else error)
    else:
        print(f"slipstream: {text}", file=sys.stderr)
    return 2 if isinstance(error, SlipstreamError) and not isinstance(error, EngineDead | EngineClosed) else 1


def one_line(error: BaseException) -> str:
    """Returns the error's text without line breaks and with options as flags. EngineDead includes its cause."""
    text = str(error) or type(error).__name__
    if isinstance(error, EngineDead) and error.__cause__ is not None:
        text += f" ({type(error.__cause__).__name__}: {error.__cause__})"
    return in_flags(" ".join(text.split()))


# Errors of the command line: options as flags, and suggestions for unknown flags.


class Parser(argparse.ArgumentParser):
    """Shows one screen of help, or all of it. Suggests the nearest flag for an unknown one, in the subcommand where it
    was given; says what flags of other programs are here."""

    def __init__(self, *, examples: Sequence[str] = (), **how: Any) -> None:
        super().__init__(add_help=False, formatter_class=_Formatter, **how)
        self.examples = examples
        text = "show this, all flags, or those with a word"
        self.add_argument("-h", "--help", action=_Help, nargs="?", const="", metavar="all|WORD", help=text)

    def format_help(self, word: str = "") -> str:
        """`word`: that all flags shown have in their names or texts; `all`: all flags; empty: the common ones."""
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        formatter.add_text(self.description)
        if not word and self.examples:
            formatter.add_text("\n".join(["examples:", *(f"  {each}" for each in self.examples)]))
        num_hidden = 0
        for group in self._action_groups:
            shown = [action for action in group._group_actions if _is_shown(action, group.title or "", word)]
            num_hidden += len([each for each in group._group_actions if each not in shown and type(each) is not _Help])
            formatter.start_section(group.title)
            formatter.add_text(group.description if shown and word else None)
            formatter.add_arguments(shown if word else [_shortened(action) for action in shown])
            formatter.end_section()
        if num_hidden and not word:
            formatter.add_text(f"{num_hidden} more flags: {self.prog} --help all, or --help WORD for those with a word")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        self._given = list(sys.argv[1:] if args is None else args)
        if self._subparsers is None:
            self._refuse_unknown()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown)
        return found, unknown

    def _refuse_unknown(self) -> None:
        """First: else the value of an unknown flag is taken for an argument, and the error is about that."""
        known = self._option_string_actions
        if not any(given.split("=")[0] in ("-h", "--help") for given in self._given):
            for given in itertools.takewhile(lambda given: given != "--", self._given):
                if given.startswith("--") and given.split("=")[0] not in known:
                    self.refuse([given])

    def error(self, message: str) -> NoReturn:
        if self.prog.endswith(" serve") and asks_for_json(self._given, os.environ):
            raise InvalidOption(message)  # without argparse's usage, which has several lines
        super().error(message)

    def refuse(self, unknown: list[str]) -> NoReturn:
        first = unknown[0].split("=")[0]
        if not first.startswith("-"):
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._argument_hint(first)}")
        if (elsewhere := flag_hint(first)) is not None:
            self.error(f"there is no flag {first}; {in_flags(elsewhere)}")
        near = difflib.get_close_matches(first, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"{self.prog} --help lists the flags"
        self.error(f"there is no flag {first}; {hint}")

    def _argument_hint(self, given: str) -> str:
        if any(action.dest == "prompt" for action in self._actions):
            return "; put a text with spaces in quotes"
        return f"; to name a model give --model {given}" if "--model" in self._option_string_actions else ""


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: object, word: Any, flag: str | None = None) -> None:
        assert isinstance(parser, Parser)
        chosen = parser
        for action in parser._subparsers._group_actions if parser._subparsers is not None else ():
            if isinstance(action.choices, dict) and word in action.choices:  # slipstream --help chat
                chosen, word = action.choices[word], ""
        parser._print_message(chosen.format_help(word), sys.stdout)
        parser.exit()


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Lines of a text with several stay as they are."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


def _is_shown(action: argparse.Action, group: str, word: str) -> bool:
    if word == "all":
        return True
    if not word:
        return not isinstance(action, _Help) and (group not in LONG_GROUPS or action.dest in COMMON)
    return word.lower().replace("_", "-") in " ".join([*action.option_strings, action.help or ""]).lower()


def _shortened(action: argparse.Action) -> argparse.Action:
    """With the first part of its help, and the default."""
    short = copy.copy(action)
    text, bracket, default = (action.help or "").partition(" (default: ")
    short.help = text.partition(";")[0] + bracket + default
    return short


def asks_for_json(argv: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a flag or the environment sets the log format of `serve` to JSON."""
    style = environ.get(FORMAT)
    for flag, value in zip(argv, [*argv[1:], ""], strict=True):
        if flag == "--log-format":
            style = value
        elif flag.startswith("--log-format="):
            style = flag.partition("=")[2]
    return style == "json"


in_flags = Flags((*Options.__struct_fields__, *ServerSettings.__struct_fields__, *SAMPLING))
