"""The `slipstream` command: its subcommands, and what a mistake looks like.

A mistake of the user is one line on stderr and exit code 2; an engine that failed is one line and exit code 1.
Nothing heavy is imported until a subcommand needs it: help comes at once and without torch.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from slipstream.errors import SlipstreamError
from slipstream.serve.cli import bench, chat, compare, doctor, embed, generate, plan, serve, version
from slipstream.serve.cli.failure import tell_failure
from slipstream.serve.cli.run import OpenLLM, open_llm
from slipstream.serve.cli.standard import settle_streams
from slipstream.serve.cli.wording import Parser, asks_for_json

INTERRUPTED = 130  # as a shell reports a process that ended by SIGINT
BROKEN_PIPE = 141  # and by SIGPIPE


def main(argv: Sequence[str] | None = None, opener: OpenLLM = open_llm) -> int:
    """Runs one command and returns its exit code. `opener` makes the LLM; tests bring their own."""
    settle_streams()
    try:
        code = _run(argv, opener)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except OSError as error:  # a disk that is full, say
        _discard_stdout()
        return tell_failure(error, as_json=_logs_json(argv))
    except SlipstreamError as error:
        return tell_failure(error, as_json=_logs_json(argv))


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="slipstream",
        description="Runs language models. `slipstream COMMAND --help` tells more of each command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version.slipstream_line())
    parser.set_defaults(run=lambda args, opener: _show_help(parser))
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=Parser
    )
    chat.add_command(commands)
    generate.add_command(commands)
    serve.add_command(commands)
    embed.add_command(commands)
    compare.add_commands(commands)
    bench.add_command(commands)
    plan.add_command(commands)
    doctor.add_command(commands)
    version.add_command(commands)
    return parser


def _run(argv: Sequence[str] | None, opener: OpenLLM) -> int:
    try:
        args = make_parser().parse_args(argv)
    except SystemExit as end:  # help was shown, or a flag is wrong; argparse has said so
        return int(end.code or 0)
    code: int = args.run(args, opener)
    return code


def _logs_json(argv: Sequence[str] | None) -> bool:
    given = sys.argv[1:] if argv is None else argv
    return given[:1] in (["serve"], ("serve",)) and asks_for_json(given, os.environ)


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 0


def _discard_stdout() -> None:
    """The reader has gone. What is still buffered would raise again when the interpreter ends."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is not a file
        pass


if __name__ == "__main__":
    sys.exit(main())
