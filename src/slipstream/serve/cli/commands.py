"""Runs a subcommand of `slipstream`, and reports its errors.

An error is one line on stderr: exit code 2 for a user error, 1 for a failure of the engine. Slow imports such as torch
happen only where a subcommand needs them, so that --help is fast; only the subcommand that is given is imported.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import slipstream
from slipstream.base.errors import SlipstreamError
from slipstream.serve.cli.elsewhere import command_hint
from slipstream.serve.cli.failure import Parser, asks_for_json, print_failure
from slipstream.serve.cli.flags import set_up_streams
from slipstream.serve.cli.run import INTERRUPTED, OpenLLM, open_llm

# the module of each subcommand, in the order of --help
MODULES = {
    "chat": "chat", "generate": "generate", "serve": "serve", "top": "top", "run-batch": "run_batch", "embed": "embed",
    "rerank": "embed", "score": "embed", "bench": "bench", "eval": "evaluate", "plan": "plan", "replay": "replay",
    "doctor": "doctor", "version": "doctor",
}  # fmt: skip
# by command; all are parsed by a test
EXAMPLES = {
    "": [
        'slipstream chat "Why is the sky blue?"',
        "slipstream serve path/to/model",
        "slipstream generate --file prompts.txt --json",
        'slipstream embed "A text" --json',
    ],
    "chat": [
        "slipstream chat",
        'slipstream chat "Why is the sky blue?" --model path/to/model',
        'git diff | slipstream chat --system "Review this change."',
    ],
    "generate": [
        "slipstream generate --file prompts.txt --json > results.jsonl",
        'slipstream generate "The capital of France is" --no-chat --max-tokens 8',
        'slipstream generate "Invent a person." --json-schema person.json --n 3',
    ],
    "serve": [
        "slipstream serve",
        "slipstream serve path/to/model --max-model-len 8192 --api-key KEY",
        "slipstream serve chat=path/one embed=path/two --host 0.0.0.0",
    ],
    "top": ["slipstream top http://127.0.0.1:8000"],
    "run-batch": ["slipstream run-batch path/to/model -i requests.jsonl -o results.jsonl"],
    "embed": ['slipstream embed "A text" --json', "slipstream embed --file texts.txt --output vectors.npy"],
    "rerank": ['slipstream rerank "a question" --file documents.txt --top-n 3'],
    "score": ['slipstream score "one text" "another text"'],
    "bench": ["slipstream bench --shape bs1", "slipstream bench serve --url http://127.0.0.1:8000 --rate 4"],
    "eval": ["slipstream eval book.txt --model model.Q4_0.gguf --reference model.F16.gguf"],
    "plan": ["slipstream plan --model path/to/model --max-model-len 32768"],
    "replay": ["slipstream replay record.slipstream --model path/to/model"],
    "doctor": ["slipstream doctor"],
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
        examples=EXAMPLES[""],
    )
    parser.add_argument("--version", action="version", version=f"slipstream {slipstream.__version__}")
    parser.set_defaults(run=lambda args, opener: _show_help(parser))
    commands: argparse._SubParsersAction[argparse.ArgumentParser] = parser.add_subparsers(
        title="commands", metavar="COMMAND", parser_class=Parser
    )
    given = MODULES.get(argv[0]) if argv else None
    for name in dict.fromkeys(MODULES.values() if given is None else [given]):
        importlib.import_module(f"slipstream.serve.cli.{name}").add_command(commands)
    for name, command in commands.choices.items():
        assert isinstance(command, Parser)
        command.examples = EXAMPLES.get(name, ())
    if argv and not argv[0].startswith("-") and argv[0] not in MODULES:
        near = difflib.get_close_matches(argv[0], MODULES, n=1)
        hint = f"did you mean {near[0]}?" if near else "slipstream --help lists the commands"
        name = next((each for each in argv[1:] if not each.startswith("-")), "MODEL")
        hint = command_hint(argv[0], name) or hint
        parser.error(f"there is no command {argv[0]}; {hint}")
    return parser


def _run(argv: Sequence[str], opener: OpenLLM) -> int:
    if list(argv[:1]) == ["help"]:
        argv = ["--help", *argv[1:]]
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
