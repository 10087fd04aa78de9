"""Runs a subcommand of `slipstream`, and reports its errors.

An error is one line on stderr: exit code 2 for a user error, 1 for a failure of the engine. Slow imports such as torch
happen only where a subcommand needs them, so that --help is fast; only the subcommand that is given is imported.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import slipstream
from slipstream.base.errors import SlipstreamError
from slipstream.serve.cli.failure import Parser, asks_for_json, print_failure
from slipstream.serve.cli.flags import set_up_streams
from slipstream.serve.cli.run import INTERRUPTED, OpenLLM, open_llm

# the module of each subcommand, in the order of --help
MODULES = {
    "chat": "chat", "generate": "generate", "serve": "serve", "top": "top", "run-batch": "run_batch", "embed": "embed",
    "rerank": "embed", "score": "embed", "bench": "bench", "eval": "evaluate", "plan": "plan", "replay": "replay",
    "doctor": "doctor", "version": "doctor",
}  # fmt: skip
BROKEN_PIPE = 141  # and for SIGPIPE


def run_command(argv: Sequence[str], opener: OpenLLM | None = None) -> int:
    """Runs one command and returns its exit code. `opener` creates the LLM."""
    set_up_streams()
    try:
        code = _run(argv, open_llm if opener is None else opener)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except OSError as error:  # for example a full disk
        _discard_stdout()
        return print_failure(error, as_json=_logs_json(argv))
    except SlipstreamError as error:
        return print_failure(error, as_json=_logs_json(argv))


def make_parser(argv: Sequence[str] = ()) -> argparse.ArgumentParser:
    """`argv`: what it will parse. If it begins with a subcommand, the parser has no other."""
    parser = Parser(
        prog="slipstream",
        description="Runs language models. `slipstream COMMAND --help` describes a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    parser.set_defaults(run=lambda args, opener: _show_help(parser))
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=Parser
    )
    given = MODULES.get(argv[0]) if argv else None
    for name in dict.fromkeys(MODULES.values() if given is None else [given]):
        importlib.import_module(f"slipstream.serve.cli.{name}").add_command(commands)
    return parser


def _run(argv: Sequence[str], opener: OpenLLM) -> int:
    try:
        args = make_parser(argv).parse_args(argv)
    except SystemExit as end:  # argparse has printed the help or an error
        return int(end.code or 0)
    code: int = args.run(args, opener)
    return code


def _logs_json(argv: Sequence[str]) -> bool:
    return list(argv[:1]) == ["serve"] and asks_for_json(argv, os.environ)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _discard_stdout() -> None:
    """Discards buffered output, which would raise again when the interpreter exits: the reader has closed the pipe."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file
        pass
