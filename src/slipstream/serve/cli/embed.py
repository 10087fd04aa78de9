"""`slipstream embed`: embeds texts; prints vectors as text or JSON lines, or writes a .npy file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from slipstream.base.errors import UserError
from slipstream.params.pooling import PoolingParams
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_prompts
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.api.llm import LLM


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
    add_comparisons(commands)


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


# `slipstream rerank` and `slipstream score`: compare one text with others, sorted by score or in the given order.

_SOURCES = 'arguments, from --file, or from standard input: one per line, or JSON lines with a field "text".'
_MODELS = "with an embedder, such as all-MiniLM-L6-v2 (the default), vectors are compared."


def add_comparisons(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rerank = _add(
        commands, "rerank", "sort documents by relevance to a query",
        f"Sorts documents by relevance to a query, best first, and prints score, index and text. Documents are "
        f"{_SOURCES} A cross-encoder reads query and document together; {_MODELS}",
        ("query", "the query"), ("document", "a document to rank"),
    )  # fmt: skip
    rerank.add_argument("--top-n", type=int, metavar="N", help="print only the best N")
    rerank.set_defaults(run=lambda args, opener: _run(args, opener, "rerank", _ranked))
    score = _add(
        commands, "score", "score pairs of texts",
        f"Scores a text with one or more others, one number per line. The others are {_SOURCES} "
        f"A cross-encoder reads both texts together; {_MODELS}",
        ("text", "the text to compare the others with"), ("other", "a text to compare"),
    )  # fmt: skip
    score.set_defaults(run=lambda args, opener: _run(args, opener, "score", _scored))


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    summary: str,
    description: str,
    one: tuple[str, str],
    other: tuple[str, str],
) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name,
        help=summary,
        description=description,
        usage=f"slipstream {name} {one[0].upper()} [{other[0].upper()} ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("one", metavar=one[0].upper(), help=one[1])
    command.add_argument("others", nargs="*", metavar=other[0].upper(), help=other[1])
    command.add_argument("--file", metavar="PATH", help=f"read {other[0]}s from a file; - is standard input")
    command.add_argument("--json", action="store_true", help=f"print one JSON object per line for each {other[0]}")
    command.add_argument("--instruction", metavar="TEXT", help="instruction for models that take one")
    add_pooling_flags(command)
    add_engine_flags(command)
    return command


Line = tuple[str, dict[str, Any]]
"""The output for one text: as a line, and as a JSON object."""


def _run(
    args: argparse.Namespace,
    opener: OpenLLM,
    task: str,
    compare: Callable[[LLM, argparse.Namespace, list[str], PoolingParams, dict[str, Any]], list[Line]],
) -> int:
    others = _read_texts(args.others, args.file, "document" if task == "rerank" else "other text")
    params = PoolingParams(truncate_prompt_tokens=args.truncate_prompt_tokens)
    how: dict[str, Any] = {}
    if args.instruction is not None:
        how["instruction"] = args.instruction
    llm = opener(**({"task": task} | engine_options(args)))
    with closing(llm):
        lines = compare(llm, args, others, params, how)
    for text, record in lines:
        print(json.dumps(record, ensure_ascii=False) if args.json else text)
    return 0


def _ranked(
    llm: LLM, args: argparse.Namespace, documents: list[str], params: PoolingParams, how: dict[str, Any]
) -> list[Line]:
    found = llm.rerank(args.one, documents, args.top_n, params, **how)
    return [
        (
            f"{each.score:.6f}\t{each.index}\t{each.document}",
            {"index": each.index, "score": each.score, "document": each.document},
        )
        for each in found
    ]


def _scored(
    llm: LLM, args: argparse.Namespace, others: list[str], params: PoolingParams, how: dict[str, Any]
) -> list[Line]:
    scores = [each.outputs.score for each in llm.score(args.one, others, params, **how)]
    return [
        (f"{score:.6f}", {"index": index, "first": args.one, "second": other, "score": score})
        for index, (other, score) in enumerate(zip(others, scores, strict=True))
    ]


def _read_texts(arguments: list[str], file: str | None, what: str) -> list[str]:
    texts = read_prompts(arguments, file, what)
    if not all(isinstance(text, str) for text in texts):
        raise UserError("rerank and score compare texts, and prompt_token_ids are given; give texts")
    return texts  # type: ignore[return-value]
