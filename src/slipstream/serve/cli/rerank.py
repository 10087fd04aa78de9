"""`slipstream rerank`: documents in the order in which they answer a query."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing

from slipstream.errors import UserError
from slipstream.pooling_params import PoolingParams
from slipstream.serve.cli.embed import add_pooling_flags
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_prompts
from slipstream.serve.cli.run import OpenLLM


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "rerank",
        help="order documents by how well they answer a query",
        description="Orders documents by how well they answer a query, the best first: score, number and text. They "
        'come as arguments, from --file, or from standard input: one a line, or JSON lines with a "text" each. A '
        "cross-encoder reads query and document together; of an embedder, as all-MiniLM-L6-v2, which runs without "
        "--model, vectors are compared.",
        usage="slipstream rerank QUERY [DOCUMENT ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("query", metavar="QUERY", help="what is looked for")
    command.add_argument("documents", nargs="*", metavar="DOCUMENT", help="text to be ranked")
    command.add_argument("--file", metavar="PATH", help="read documents from a file; - is standard input")
    command.add_argument("--top-n", type=int, metavar="N", help="show only the best N")
    command.add_argument("--json", action="store_true", help="print one JSON object a line for each document")
    command.add_argument("--instruction", metavar="TEXT", help="what to look for, where the model takes one")
    add_pooling_flags(command)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    documents = read_texts(args.documents, args.file)
    params = PoolingParams(truncate_prompt_tokens=args.truncate_prompt_tokens)
    llm = opener(**({"task": "rerank"} | engine_options(args)))
    with closing(llm):
        how = {} if args.instruction is None else {"instruction": args.instruction}
        found = llm.rerank(args.query, documents, args.top_n, params, use_tqdm=sys.stderr.isatty(), **how)
    for one in found:
        if args.json:
            record = {"index": one.index, "score": one.score, "document": one.document}
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(f"{one.score:.6f}\t{one.index}\t{one.document}")
    return 0


def read_texts(arguments: list[str], file: str | None) -> list[str]:
    texts = read_prompts(arguments, file)
    if not all(isinstance(text, str) for text in texts):
        raise UserError("prompt_token_ids cannot be compared; give texts")
    return texts  # type: ignore[return-value]
