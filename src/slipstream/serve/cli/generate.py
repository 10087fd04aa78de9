"""`slipstream generate`: completes prompts in one batch; prints texts or JSON lines."""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.errors import InvalidPrompt, UserError
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.serve.cli.flags import add_engine_flags, add_sampling_flags, read_stdin
from slipstream.serve.cli.run import OpenLLM, open_with

if TYPE_CHECKING:
    from slipstream.front.results import RequestOutput

Prompt = str | list[int]
_SETTINGS = frozenset(SamplingParams.__struct_fields__)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "generate",
        help="complete prompts",
        description="Completes prompts in one batch. Prompts are arguments, from --file, or from standard input: one "
        'per line, or JSON lines with a field "prompt" or "prompt_token_ids".',
        usage="slipstream generate [PROMPT ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompts", nargs="*", metavar="PROMPT", help="a text to complete")
    command.add_argument("--file", metavar="PATH", help="read prompts from a file; - is standard input")
    command.add_argument("--json", action="store_true", help="print one JSON object per line for each text")
    command.add_argument("--chat", action="store_true", help="apply the model's chat template to each prompt")
    command.add_argument("--system", metavar="TEXT", help="the system message, with --chat")
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
    if args.system is not None and not args.chat:
        raise UserError("--system needs --chat: a plain prompt has no system message; add --chat or remove it")
    prompts = read_prompts(args.prompts, args.file, settings=_SETTINGS)
    conversations = [_conversation(prompt, args.system) for prompt in prompts] if args.chat else None
    structured = _structured_outputs(args)
    llm, params = open_with(args, opener)
    if structured is not None:
        params = params.with_changes(structured_outputs=structured)
    with closing(llm):
        if conversations is not None:
            outputs = llm.chat(conversations, params)
        else:
            given = [{"prompt": p} if isinstance(p, str) else {"prompt_token_ids": p} for p in prompts]
            outputs = llm.generate(given, params)
    if args.json:
        print_json(prompts, outputs)
    else:
        print_text(outputs)
    return 0


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


def print_text(outputs: list[RequestOutput]) -> None:
    """Prints texts in the order of their prompts, separated by an empty line."""
    print("\n\n".join(completion.text for output in outputs for completion in output.outputs))


def print_json(prompts: list[Prompt], outputs: list[RequestOutput]) -> None:
    for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
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
            print(json.dumps(record, ensure_ascii=False))


def _conversation(prompt: Prompt, system: str | None) -> list[dict[str, str]]:
    if not isinstance(prompt, str):
        raise InvalidPrompt("a chat template needs text, and prompt_token_ids are given; remove --chat or give text")
    opening = [] if system is None else [{"role": "system", "content": system}]
    return [*opening, {"role": "user", "content": prompt}]


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
