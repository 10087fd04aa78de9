"""`slipstream rerank` and `slipstream score`: one text beside others; in the order in which they go with it, or as they
came."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import closing
from typing import TYPE_CHECKING, Any

from slipstream.errors import UserError
from slipstream.pooling_params import PoolingParams
from slipstream.serve.cli.embed import add_pooling_flags
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_prompts
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.llm import LLM

_WHENCE = 'arguments, from --file, or from standard input: one a line, or JSON lines with a "text" each.'
_WHO = "of an embedder, as all-MiniLM-L6-v2, which runs without --model, vectors are compared."


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    rerank = _add(
        commands, "rerank", "order documents by how well they answer a query",
        f"Orders documents by how well they answer a query, the best first: score, number and text. They come as "
        f"{_WHENCE} A cross-encoder reads query and document together; {_WHO}",
        ("query", "what is looked for"), ("document", "text to be ranked"),
    )  # fmt: skip
    rerank.add_argument("--top-n", type=int, metavar="N", help="show only the best N")
    rerank.set_defaults(run=lambda args, opener: _run(args, opener, "rerank", _ranked))
    score = _add(
        commands, "score", "tell how well texts go together",
        f"Tells how well a text goes together with one or more others, a number a line. The others come as {_WHENCE} "
        f"A cross-encoder reads both texts at once; {_WHO}",
        ("text", "what the others are compared with"), ("other", "text to compare"),
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
    command.add_argument("--json", action="store_true", help=f"print one JSON object a line for each {other[0]}")
    command.add_argument("--instruction", metavar="TEXT", help="what to go by, where the model takes one")
    add_pooling_flags(command)
    add_engine_flags(command)
    return command


Line = tuple[str, dict[str, Any]]
"""Of one text: for people, and for programs."""


def _run(
    args: argparse.Namespace,
    opener: OpenLLM,
    task: str,
    compare: Callable[[LLM, argparse.Namespace, list[str], PoolingParams, dict[str, Any]], list[Line]],
) -> int:
    others = _read_texts(args.others, args.file)
    params = PoolingParams(truncate_prompt_tokens=args.truncate_prompt_tokens)
    how: dict[str, Any] = {"use_tqdm": sys.stderr.isatty()}
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


def _read_texts(arguments: list[str], file: str | None) -> list[str]:
    texts = read_prompts(arguments, file)
    if not all(isinstance(text, str) for text in texts):
        raise UserError("prompt_token_ids cannot be compared; give texts")
    return texts  # type: ignore[return-value]
