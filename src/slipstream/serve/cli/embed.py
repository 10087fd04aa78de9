"""`slipstream embed`: embeds texts; prints vectors as text or JSON lines, or writes a .npy file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from slipstream.base.errors import UserError
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_prompts
from slipstream.serve.cli.run import OpenLLM


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "embed",
        help="embed texts",
        description="Embeds texts. Texts are arguments, from --file, or from standard input: one per line, or JSON "
        'lines with a field "text" or "prompt_token_ids". The default model is all-MiniLM-L6-v2.',
        usage="slipstream embed [TEXT ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompts", nargs="*", metavar="TEXT", help="text to embed")
    command.add_argument("--file", metavar="PATH", help="read texts from a file; - is standard input")
    command.add_argument(
        "--output",
        metavar="PATH",
        help="write to this file: .npy has a matrix with one row per text, others have JSON lines",
    )
    command.add_argument("--json", action="store_true", help="print one JSON object per line for each text")
    add_pooling_flags(command)
    command.add_argument("--prompt-name", metavar="NAME", help="name of a prompt of the model, put before each text")
    command.add_argument("--dimensions", type=int, metavar="N", help="truncate vectors to this size (Matryoshka)")
    add_engine_flags(command)
    command.set_defaults(run=run)


def add_pooling_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--truncate-prompt-tokens", type=int, metavar="N", help="truncate texts to N tokens; -1: the model's limit"
    )


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    from slipstream.params.pooling import PoolingParams

    texts = read_prompts(args.prompts, args.file, "text")
    output = None if args.output is None else Path(args.output)
    if output is not None and args.json:
        raise UserError("--json prints to standard output and --output writes a file; remove one of them")
    if output is not None and not output.parent.is_dir():  # checked before the work
        raise UserError(f"cannot write {output}: there is no folder {output.parent}; create it first")
    params = PoolingParams(
        task="embed", dimensions=args.dimensions, truncate_prompt_tokens=args.truncate_prompt_tokens
    )  # raises before the model is loaded
    given: list[Any] = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in texts]
    llm = opener(**({"task": "embed"} | engine_options(args)))
    with closing(llm):
        found = llm.embed(given, params, prompt_name=args.prompt_name)
    vectors = [one.outputs.array for one in found]
    if output is not None and output.suffix == ".npy":
        import numpy as np  # already loaded with the model

        with _writing(output, "wb") as file:
            np.save(file, np.stack(vectors))
    elif output is not None:
        with _writing(output, "w") as file:
            file.writelines(line + "\n" for line in _json_lines(texts, vectors))
    elif args.json:
        for line in _json_lines(texts, vectors):
            print(line)
    else:
        for vector in vectors:
            print(" ".join(f"{number:.6g}" for number in vector))
    return 0


def _json_lines(texts: list[Any], vectors: list[Any]) -> Iterator[str]:
    for index, (text, vector) in enumerate(zip(texts, vectors, strict=True)):
        named = {"text": text} if isinstance(text, str) else {"prompt_token_ids": text}
        values = [float(f"{number:.9g}") for number in vector]  # exact for float32
        yield json.dumps({"index": index, **named, "embedding": values}, ensure_ascii=False)


def _writing(path: Path, mode: str) -> IO[Any]:
    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
