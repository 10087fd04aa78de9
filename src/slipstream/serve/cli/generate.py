"""`slipstream generate`: runs prompts in one batch; prints texts or JSON lines as they are done."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.errors import InvalidPrompt, UserError
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, read_stdin
from slipstream.serve.cli.run import INTERRUPTED, OpenLLM, open_with

if TYPE_CHECKING:
    from slipstream.front.results import RequestOutput

Prompt = str | list[int]
_SETTINGS = frozenset(SamplingParams.__struct_fields__)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "generate",
        help="run many prompts",
        description="Runs prompts in one batch. Prompts are arguments, from --file, or from standard input: one per "
        'line, or JSON lines with a field "prompt" or "prompt_token_ids". Texts go through the model\'s chat template, '
        "if it has one. Results are printed when they are done, so Ctrl-C loses none of them.",
        usage="slipstream generate [PROMPT ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to complete")
    command.add_argument("--file", metavar="PATH", help="read prompts from a file; - is standard input")
    command.add_argument(
        "--json", action="store_true", help="print a JSON object per line for each text, whichever is done first"
    )
    command.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="apply the model's chat template to each prompt, or continue the text itself (default: apply it if there "
        "is one and all prompts are texts)",
    )
    command.add_argument("--system", metavar="TEXT", help="the system message of the chat template")
    command.add_argument("--n", type=int, metavar="N", default=1, help="samples per prompt (default: 1)")
    shapes = command.add_argument_group("structured output").add_mutually_exclusive_group()
    shapes.add_argument("--json-schema", metavar="FILE", help="texts are JSON that is valid under this schema")
    shapes.add_argument("--json-object", action="store_true", help="texts are JSON objects")
    shapes.add_argument("--regex", metavar="TEXT", help="texts match this regular expression")
    shapes.add_argument(
        "--choice", action="append", metavar="TEXT", help="texts are one of these; give it several times"
    )
    shapes.add_argument("--grammar", metavar="FILE", help="texts follow this grammar, in Lark's or llama.cpp's syntax")
    add_sampling_flags(command, max_tokens=256)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    if args.system is not None and args.chat is False:
        raise UserError("--system is for the chat template, and --no-chat leaves it out; remove one of them")
    prompts = read_prompts(args.prompts, args.file, settings=_SETTINGS)
    needs_chat = args.chat or args.system is not None
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if needs_chat and len(texts) < len(prompts):
        raise InvalidPrompt(
            "a chat template needs text, and prompt_token_ids are given; remove --chat and --system, or give text"
        )
    structured = _structured_outputs(args)
    llm, params = open_with(args, opener)
    if structured is not None:
        params = params.with_changes(structured_outputs=structured)
    printer = Printer(prompts, as_json=args.json)
    shows_progress = not sys.stdout.isatty()  # where the results themselves do
    start = time.monotonic()
    with closing(llm):
        has_template = (tokenizer := llm.tokenizer) is not None and tokenizer.chat_template() is not None
        try:
            if needs_chat or (args.chat is None and has_template and len(texts) == len(prompts)):
                conversations = [_conversation(text, args.system) for text in texts]
                llm.chat(conversations, params, shows_progress, on_result=printer.take)
            else:
                given = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
                llm.generate(given, params, shows_progress, on_result=printer.take)
        except KeyboardInterrupt:
            printer.flush()
            print(f"\ninterrupted: {printer.summary(time.monotonic() - start)}", file=sys.stderr)
            return INTERRUPTED
    print(printer.summary(time.monotonic() - start), file=sys.stderr)
    return 0


class Printer:
    """Prints results as they are done: JSON lines at once, texts in the order of their prompts."""

    def __init__(self, prompts: list[Prompt], *, as_json: bool) -> None:
        self._prompts = prompts
        self._as_json = as_json
        self._unprinted: dict[int, RequestOutput] = {}  # texts of which an earlier one is missing
        self._num_printed = self._num_done = self._num_read = self._num_generated = 0
        self._has_printed = False

    def take(self, number: int, output: RequestOutput) -> None:
        self._num_done += 1
        self._num_read += len(output.prompt_token_ids or ())
        self._num_generated += sum(len(completion.token_ids) for completion in output.outputs)
        if self._as_json:
            print_json(number, self._prompts[number], output)
            return
        self._unprinted[number] = output
        while (ready := self._unprinted.pop(self._num_printed, None)) is not None:
            self._print_text(ready)

    def flush(self) -> None:
        """Prints what waits for earlier texts, each with the number of its prompt."""
        for number in sorted(self._unprinted):
            self._print_text(self._unprinted[number], f"[prompt {number + 1}] ")

    def summary(self, seconds: float) -> str:
        done, tokens = (
            f"{self._num_done} of {len(self._prompts)} prompts are done",
            self._num_read + self._num_generated,
        )
        return (
            f"{done}: {self._num_read} prompt and {self._num_generated} generated tokens in {seconds:.1f} s, "
            f"{tokens / max(seconds, 1e-9):.0f} tok/s"
        )

    def _print_text(self, output: RequestOutput, mark: str = "") -> None:
        """An empty line comes between texts."""
        for completion in output.outputs:
            print(("\n" if self._has_printed else "") + mark + completion.text, flush=True)
            self._has_printed = True
        self._num_printed += 1


def _structured_outputs(args: argparse.Namespace) -> StructuredOutputsParams | None:
    """Read before the model is loaded, so that a mistake is reported at once."""
    if args.json_schema is not None:
        return StructuredOutputsParams(json=read_file(Path(args.json_schema), "a schema"))
    if args.grammar is not None:
        return StructuredOutputsParams(grammar=read_file(Path(args.grammar), "a grammar"))
    if args.regex is not None:
        return StructuredOutputsParams(regex=args.regex)
    if args.choice is not None:
        return StructuredOutputsParams(choice=args.choice)
    return StructuredOutputsParams(json_object=True) if args.json_object else None


def read_prompts(
    arguments: list[str], file: str | None, what: str = "prompt", settings: frozenset[str] = frozenset()
) -> list[Prompt]:
    """Returns the prompts of the arguments, else of the file, else of standard input. `what`: their name in errors;
    `settings`: fields that would do nothing in a JSON line. Others, as an id, are the user's own."""
    if arguments and file is not None:
        raise UserError(f"{what}s are given as arguments and with --file; remove one of them")
    prompts: list[Prompt]
    if arguments:
        prompts = list(arguments)
    elif file is not None and file != "-":
        prompts = parse_prompts(read_file(Path(file), f"{what}s"), file, settings)
    else:
        prompts = parse_prompts(read_stdin(of_terminal=file == "-") or "", "standard input", settings)
    if not prompts:
        raise InvalidPrompt(f"there is no {what}; give one as an argument, with --file or on standard input")
    return prompts


def parse_prompts(text: str, source: str, settings: frozenset[str] = frozenset()) -> list[Prompt]:
    """Parses one prompt per line. If the first line is a JSON object, all must be. Empty lines are skipped."""
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines or not isinstance(_json_or_none(lines[0][1]), dict):
        return [line.rstrip("\r") for _, line in lines]
    return [_prompt_of(_json_or_none(line), f"{source} line {number}", settings) for number, line in lines]


def print_json(index: int, prompt: Prompt, output: RequestOutput) -> None:
    for completion in output.outputs:
        record = {
            "index": index,
            "sample": completion.index,
            "prompt": prompt if isinstance(prompt, str) else output.prompt,
            "text": completion.text,
            "token_ids": list(completion.token_ids),
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "num_prompt_tokens": len(output.prompt_token_ids or ()),
            "num_cached_tokens": output.num_cached_tokens,
        }
        print(json.dumps(record, ensure_ascii=False), flush=True)


def _conversation(text: str, system: str | None) -> list[dict[str, str]]:
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": text}]


def _prompt_of(record: Any, name: str, settings: frozenset[str]) -> Prompt:
    if isinstance(record, dict):
        if given := sorted({*record} & settings):
            raise InvalidPrompt(
                f"{name} has {', '.join(given)}: settings are flags here, for all prompts; give a flag, or use "
                "`slipstream run-batch`, which takes settings for each line"
            )
        if isinstance(text := record.get("prompt", record.get("text")), str):
            return text
        ids = record.get("prompt_token_ids")
        if isinstance(ids, list) and all(type(i) is int for i in ids):
            return ids
    raise InvalidPrompt(
        f'{name} is not a JSON object with a "prompt", "text" or "prompt_token_ids"; each line must be one'
    )


def _json_or_none(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def read_file(path: Path, what: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")  # without a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UserError(f"cannot read {what} from {path}: {reason}") from None
