"""`slipstream chat`: one answer, or a conversation in the terminal."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from slipstream.errors import InvalidOption, InvalidPrompt, UserError
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, engine_options, sampling_changes
from slipstream.serve.cli.run import OpenLLM, open_with
from slipstream.serve.cli.standard import read_stdin

if TYPE_CHECKING:
    from slipstream.llm import LLM
    from slipstream.params import SamplingParams
    from slipstream.serve.remote_chat import RemoteChat

Message = dict[str, str]

HELP = """\
/help    this list
/reset   forget the conversation
/exit    leave; so does Ctrl-D
Ctrl-C stops an answer."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "chat",
        help="answer a prompt, or talk in the terminal",
        description="Answers a prompt, streaming. Without one it reads standard input when that is a pipe, "
        "and opens a conversation when it is a terminal.",
        usage="slipstream chat [PROMPT] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompt", nargs="?", metavar="PROMPT", help="what to ask")
    command.add_argument("--system", metavar="TEXT", help="the system message, which tells the model how to behave")
    command.add_argument("--url", metavar="URL", help="talk to a server there; --model is then a name that it serves")
    command.add_argument("--api-key", metavar="KEY", help="of that server (default: SLIPSTREAM_API_KEY)")
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
    from slipstream.params import SamplingParams
    from slipstream.serve.remote_chat import RemoteChat

    if useless := sorted(set(engine_options(args)) - {"model"}):
        raise InvalidOption(f"with --url the server has the model; {', '.join(useless)} cannot be set from here")
    changes = sampling_changes(args)
    params = SamplingParams(**changes)
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None
    return RemoteChat(args.url, model=getattr(args, "model", None), api_key=key, changes=changes), params


class Conversation:
    """The messages so far. A question that fails leaves no trace in them."""

    def __init__(self, llm: LLM | RemoteChat, params: SamplingParams, system: str | None) -> None:
        self.llm = llm
        self.params = params
        self.opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self.opening)

    def talk(self) -> None:
        """Questions from the terminal until the user leaves."""
        _edit_lines()
        print("Ask away; /help lists the commands.", file=sys.stderr)
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
                print(f"there is no command {line.split()[0]}; /help lists them")
            elif line:
                try:
                    with _interrupts() as asked:
                        self.ask(line, asked)
                except UserError as error:  # too long, say: the conversation goes on
                    print(f"{error} (/reset forgets the conversation)", file=sys.stderr)

    def ask(self, question: str, interrupted: list[bool] | None = None) -> None:
        """Prints the answer as it comes. It ends early once `interrupted` holds something."""
        messages = [*self.messages, {"role": "user", "content": question}]
        shown = ""
        reason = None
        for output in self.llm.stream_chat(messages, self.params):
            answer = output.outputs[0]
            sys.stdout.write(answer.text[len(shown) :])
            sys.stdout.flush()
            shown, reason = answer.text, answer.finish_reason
            if interrupted:
                break  # leaving the loop aborts the request
        print(flush=True)
        if reason == "length":
            print(f"[cut off at the length limit; --max-tokens is {self.params.max_tokens}]", file=sys.stderr)
        self.messages = [*messages, {"role": "assistant", "content": shown}]


@contextmanager
def _interrupts() -> Iterator[list[bool]]:
    """Collects Ctrl-C instead of raising it anywhere, which could leave a step half done. A second one raises."""
    asked: list[bool] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(True)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, before)


def _edit_lines() -> None:
    """Arrow keys and line history in `input`, where the platform has them."""
    try:
        import readline  # noqa: F401  # importing it is what does it
    except ImportError:
        pass
