"""`slipstream chat`: answers one prompt, or runs a conversation in the terminal."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slipstream.base.errors import EngineDead, InvalidOption, InvalidPrompt, UserError
from slipstream.serve.cli.failure import one_line
from slipstream.serve.cli.flags import (
    SAMPLING,
    add_engine_flags,
    add_sampling_flags,
    engine_options,
    read_sampling,
    read_stdin,
    sampling_changes,
)
from slipstream.serve.cli.run import OpenLLM, open_with

if TYPE_CHECKING:
    from slipstream.api.llm import LLM
    from slipstream.front.results import RequestOutput
    from slipstream.params.sampling import SamplingParams


Message = dict[str, str]

HELP = """\
/help               show this list
/set                show what is set; /set NAME VALUE changes it: system, temperature, top_p, max_tokens ...
/retry              answer the last message again
/save FILE          write the conversation as JSON
/reset              start a new conversation
/exit               exit, as Ctrl-D does
\"\"\" begins a message of several lines and ends it; so does a backslash at the end of a line, for one more line.
Ctrl-C stops an answer, or clears the line."""
_QUOTES = '"""'


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
        print(f"{next(iter(self.llm.models))}. Type a message; /help lists the commands.", file=sys.stderr)
        while True:
            try:
                text = _read_message().strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(/exit or Ctrl-D exits)", file=sys.stderr)
                continue
            command, _, rest = text.partition(" ")
            if command in ("/exit", "/quit", "/bye"):
                return
            try:
                if not text.startswith("/"):
                    if text:
                        self._answer(text)
                elif (run := self._commands().get(command)) is not None:
                    run(rest.strip())
                else:
                    print(f"there is no command {command}; /help lists the commands")
            except UserError as error:  # for example too long: the conversation continues
                print(f"{one_line(error)} (/reset starts a new conversation)", file=sys.stderr)

    def _commands(self) -> dict[str, Callable[[str], None]]:
        return {
            "/help": lambda rest: print(HELP), "/reset": self._reset, "/retry": self._retry, "/save": self._save,
            "/set": self._set,
        }  # fmt: skip

    def _answer(self, question: str) -> None:
        with _interrupts() as interrupted:
            self.ask(question, interrupted, with_speed=True)

    def _reset(self, rest: str) -> None:
        self.messages = list(self.opening)

    def _retry(self, rest: str) -> None:
        if len(self.messages) <= len(self.opening):
            raise InvalidPrompt("there is no message to answer again; type one")
        kept = self.messages
        *self.messages, question, _ = kept
        try:
            self._answer(question["content"])
        except BaseException:
            self.messages = kept
            raise

    def _save(self, rest: str) -> None:
        if not rest:
            raise UserError("/save has no file; give a name, as /save talk.json")
        text = json.dumps({"messages": self.messages}, ensure_ascii=False, indent=1)
        try:
            with open(Path(rest).expanduser(), "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except OSError as error:
            raise UserError(f"cannot write {rest}: {error.strerror}; give another name") from None
        print(f"{len(self.messages)} messages in {rest}", file=sys.stderr)

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        name = name.lstrip("-").replace("-", "_")
        if not name:
            for each in SAMPLING:
                print(f"{each:<24}{getattr(self.params, each)}")
            print(f"{'system':<24}{self.opening[0]['content'] if self.opening else ''}")
        elif name == "system":
            talk = self.messages[len(self.opening) :]
            self.opening = [{"role": "system", "content": value}] if value else []
            self.messages = [*self.opening, *talk]
        else:
            changes = {name: read_sampling(name, value)}
            self.params = self.params.with_changes(**changes)
            if isinstance(self.llm, RemoteChat):
                self.llm.change(changes)

    def ask(self, question: str, interrupted: list[bool] | None = None, *, with_speed: bool = False) -> None:
        """Prints the answer as it is generated, and `with_speed` how fast. Stops when `interrupted` is not empty."""
        messages = [*self.messages, {"role": "user", "content": question}]
        shown, reason, num_tokens = "", None, 0
        start = first = time.monotonic()
        for output in self.llm.stream_chat(messages, self.params):
            answer = output.outputs[0]
            first = first if shown else time.monotonic()
            sys.stdout.write(answer.text[len(shown) :])
            sys.stdout.flush()
            shown, reason, num_tokens = answer.text, answer.finish_reason, len(answer.token_ids)
            if interrupted:
                break  # aborts the request
        print(flush=True)
        if reason == "length":
            print(f"[cut off at the length limit; --max-tokens is {self.params.max_tokens}]", file=sys.stderr)
        if with_speed and num_tokens > 1 and (seconds := time.monotonic() - first) > 0:
            speed = f"{(num_tokens - 1) / seconds:.0f} tok/s, the first after {first - start:.2f} s"
            print(f"[{num_tokens} tokens, {speed}]", file=sys.stderr)
        self.messages = [*messages, {"role": "assistant", "content": shown}]


def _read_message() -> str:
    """A line, or several between quotes or with backslashes at their ends."""
    text = input("> ")
    if text.startswith(_QUOTES):
        text = text[len(_QUOTES) :]
        while not text.rstrip().endswith(_QUOTES):
            text += "\n" + input("... ")
        return text.rstrip()[: -len(_QUOTES)]
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input("... ")
    return text


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


# RemoteChat: a server somewhere, with the face of an LLM as far as a conversation needs it.

_THINK, _END_THINK = "<think>\n", "\n</think>\n\n"


class _LimitTooLarge(UserError):
    """Prompt and max_tokens do not fit the context together."""


class RemoteChat:
    def __init__(self, url: str, *, model: str | None, api_key: str | None, changes: dict[str, Any]) -> None:
        """`changes`: what was said about sampling; the server's model decides on the rest."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidOption(f"url is {url!r}; give one like http://127.0.0.1:8000")
        self._host, self._port, self._encrypted = parts.hostname, parts.port, parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._body: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **changes}
        if model is not None:
            self._body["model"] = model
        self.models = [url if model is None else model]

    def change(self, changes: dict[str, Any]) -> None:
        self._body |= changes

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        """As `LLM.stream_chat`. Leaving the loop early hangs up, and the server ends the request."""
        from slipstream.front.results import CompletionOutput, RequestOutput

        kind = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port)
        answer = CompletionOutput(0, "", [])
        result = RequestOutput("remote", None, [], None, [answer], False)
        body = {**self._body, "messages": messages}
        try:
            try:
                response = self._send(connection, body)
            except _LimitTooLarge:
                body.pop("max_tokens", None)  # then the limit is the rest of the context, as it is for an LLM
                response = self._send(connection, body)
            for event in _events(response):
                if usage := event.get("usage"):  # the last event
                    answer.token_ids = [0] * usage["completion_tokens"]
                    yield result
                for choice in event["choices"]:
                    answer.text += _text(choice["delta"], answer.text)
                    answer.finish_reason = choice["finish_reason"]
                    result.finished = answer.finish_reason is not None
                    yield result
        except (OSError, http.client.HTTPException) as error:
            raise EngineDead(f"the server cannot be reached: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection.request("POST", self._path, json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response.status, response.read())
        return response

    def close(self) -> None:
        """Connections end with their answers."""


def _text(delta: dict[str, Any], before: str) -> str:
    """The text of an event after the text `before`. Reasoning, which the server separates, is shown between tags."""
    reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
    is_open = before.startswith(_THINK) and _END_THINK not in before
    if reasoning and not is_open:
        reasoning = _THINK + reasoning
    if content and (is_open or reasoning):
        content = _END_THINK + content
    return reasoning + content


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineDead(event["error"]["message"])
            yield event


def _error(status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
        text = error["message"]
        if error.get("code") == "context_length_exceeded" and error.get("param") == "max_tokens":
            return _LimitTooLarge(f"the server said {status}: {text}")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:200].decode(errors="replace")
    return (UserError if status < 500 else EngineDead)(f"the server said {status}: {text}")
