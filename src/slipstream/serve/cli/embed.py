"""`slipstream embed`: a vector for each text, as lines of numbers, JSON lines or a .npy file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any

from slipstream.errors import UserError
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_prompts
from slipstream.serve.cli.run import OpenLLM


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "embed",
        help="turn texts into vectors",
        description="Turns texts into vectors. They come as arguments, from --file or from standard input: one a line, "
        'or JSON lines with a "text" or "prompt_token_ids" each. Without --model it runs all-MiniLM-L6-v2.',
        usage="slipstream embed [TEXT ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("prompts", nargs="*", metavar="TEXT", help="text to embed")
    command.add_argument("--file", metavar="PATH", help="read texts from a file; - is standard input")
    command.add_argument(
        "--output", metavar="PATH", help="write there: .npy is a matrix with a line for each text, others JSON lines"
    )
    command.add_argument("--json", action="store_true", help="print one JSON object a line for each text")
    add_pooling_flags(command)
    command.add_argument("--prompt-name", metavar="NAME", help="put the model's prompt of this name before each text")
    command.add_argument("--dimensions", type=int, metavar="N", help="cut vectors to this many numbers")
    add_engine_flags(command)
    command.set_defaults(run=run)


def add_pooling_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--truncate-prompt-tokens", type=int, metavar="N", help="cut texts to N tokens; -1 is what the model takes"
    )


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    from slipstream.pooling_params import PoolingParams

    texts = read_prompts(args.prompts, args.file)
    output = None if args.output is None else Path(args.output)
    if output is not None and args.json:
        raise UserError("--json is for the terminal and --output says where else to; choose one")
    if output is not None and not output.parent.is_dir():  # better now than when the work is done
        raise UserError(f"cannot write {output}: there is no folder {output.parent}; make it first")
    params = PoolingParams(
        task="embed", dimensions=args.dimensions, truncate_prompt_tokens=args.truncate_prompt_tokens
    )  # a bad flag is found before the model is loaded
    given: list[Any] = [text if isinstance(text, str) else {"prompt_token_ids": text} for text in texts]
    llm = opener(**({"task": "embed"} | engine_options(args)))
    with closing(llm):
        found = llm.embed(given, params, prompt_name=args.prompt_name, use_tqdm=sys.stderr.isatty())
    vectors = [one.outputs.data for one in found]
    if output is not None and output.suffix == ".npy":
        import numpy as np  # here already, by way of the model

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
        numbers = [float(f"{number:.9g}") for number in vector]  # enough to read the same float32 back
        yield json.dumps({"index": index, **named, "embedding": numbers}, ensure_ascii=False)


def _writing(path: Path, mode: str) -> IO[Any]:
    try:
        return open(path, mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
