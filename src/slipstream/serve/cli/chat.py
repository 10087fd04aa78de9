"""`slipstream chat`: answers one prompt, or runs a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from slipstream.base.errors import InvalidOption, InvalidPrompt, UserError
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, engine_options, sampling_changes
from slipstream.serve.cli.run import OpenLLM, open_with
from slipstream.serve.cli.standard import read_stdin

if TYPE_CHECKING:
    from slipstream.api.llm import LLM
    from slipstream.params.sampling import SamplingParams
    from slipstream.serve.remote_chat import RemoteChat

Message = dict[str, str]

HELP = """\
/help    show this list
/reset   start a new conversation
/exit    exit, as Ctrl-D does
Ctrl-C stops an answer."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "chat",
        help="answer a prompt, or chat in the terminal",
        description="Answers a prompt and streams the answer. Without a prompt it reads standard input if that is a "
        "pipe, and starts a conversation if it is a terminal.",
        usage="slipstream chat [PROMPT] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="the user message")
    command.add_argument("--system", metavar="TEXT", help="the system message")
    command.add_argument(
        "--url", metavar="URL", help="use a server at this URL; --model is then the name of one of its models"
    )
    command.add_argument("--api-key", metavar="KEY", help="API key of that server (default: SLIPSTREAM_API_KEY)")
    add_sampling_flags(command, max_tokens=1024)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    prompt = args.prompt
    if prompt is None:
        prompt = read_stdin()
    if prompt is not None and not prompt.strip():
        raise InvalidPrompt("the prompt is empty; give one as an argument or on standard input")
    llm, params = open_with(args, opener) if args.url is None else open_remote(args)
    conversation = Conversation(llm, params, args.system)
    with closing(llm):
        if prompt is None:
            conversation.talk()
        else:
            conversation.ask(prompt)
    return 0


def open_remote(args: argparse.Namespace) -> tuple[RemoteChat, SamplingParams]:
    from slipstream.params.sampling import SamplingParams
    from slipstream.serve.remote_chat import RemoteChat

    if unused := sorted(set(engine_options(args)) - {"model"}):
        raise InvalidOption(
            f"{', '.join(unused)} cannot be set with --url: they are options of the server; remove them"
        )
    changes = sampling_changes(args)
    params = SamplingParams(**changes)
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None
    return RemoteChat(args.url, model=getattr(args, "model", None), api_key=key, changes=changes), params


class Conversation:
    """A conversation. A message that fails is not added to it."""

    def __init__(self, llm: LLM | RemoteChat, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def talk(self) -> None:
        """Reads messages from the terminal until the user exits."""
        _edit_lines()
        print("Type a message; /help lists the commands.", file=sys.stderr)
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                print()
                return
            if line == "/exit":
                return
            if line == "/reset":
                self.messages = list(self.opening)
            elif line == "/help":
                print(HELP)
            elif line.startswith("/"):
                print(f"there is no command {line.split()[0]}; /help lists the commands")
            elif line:
                try:
                    with _interrupts() as interrupted:
                        self.ask(line, interrupted)
                except UserError as error:  # for example too long: the conversation continues
                    print(f"{error} (/reset starts a new conversation)", file=sys.stderr)

    def ask(self, question: str, interrupted: list[bool] | None = None) -> None:
        """Prints the answer as it is generated. Stops when `interrupted` is not empty."""
        messages = [*self.messages, {"role": "user", "content": question}]
        shown = ""
        reason = None
        for output in self.llm.stream_chat(messages, self.params):
            answer = output.outputs[0]
            sys.stdout.write(answer.text[len(shown) :])
            sys.stdout.flush()
            shown, reason = answer.text, answer.finish_reason
            if interrupted:
                break  # aborts the request
        print(flush=True)
        if reason == "length":
            print(f"[cut off at the length limit; --max-tokens is {self.params.max_tokens}]", file=sys.stderr)
        self.messages = [*messages, {"role": "assistant", "content": shown}]


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Records the first Ctrl-C instead of raising it, which could interrupt a step. The second raises."""
    interrupted: list[bool] = []

    def on_signal(number: int, frame: object) -> None:
        if interrupted:
            raise KeyboardInterrupt
        interrupted.append(True)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Enables arrow keys and line history in `input`, where the platform has readline."""
    try:
        import readline  # noqa: F401  # the import has this effect
    except ImportError:
        pass
