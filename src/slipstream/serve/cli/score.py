"""`slipstream score`: how well texts go together."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import closing

from slipstream.pooling_params import PoolingParams
from slipstream.serve.cli.embed import add_pooling_flags
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.rerank import read_texts
from slipstream.serve.cli.run import OpenLLM


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "score",
        help="tell how well texts go together",
        description="Tells how well a text goes together with one or more others, a number a line. The others come as "
        'arguments, from --file, or from standard input: one a line, or JSON lines with a "text" each. A cross-encoder '
        "reads both texts at once; of an embedder, as all-MiniLM-L6-v2, which runs without --model, vectors are "
        "compared.",
        usage="slipstream score TEXT [OTHER ...] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("text", metavar="TEXT", help="what the others are compared with")
    command.add_argument("others", nargs="*", metavar="OTHER", help="text to compare")
    command.add_argument("--file", metavar="PATH", help="read the others from a file; - is standard input")
    command.add_argument("--json", action="store_true", help="print one JSON object a line for each pair")
    command.add_argument("--instruction", metavar="TEXT", help="what to compare by, where the model takes one")
    add_pooling_flags(command)
    add_engine_flags(command)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    others = read_texts(args.others, args.file)
    params = PoolingParams(truncate_prompt_tokens=args.truncate_prompt_tokens)
    llm = opener(**({"task": "score"} | engine_options(args)))
    with closing(llm):
        how = {} if args.instruction is None else {"instruction": args.instruction}
        found = llm.score(args.text, others, params, use_tqdm=sys.stderr.isatty(), **how)
    for index, (other, one) in enumerate(zip(others, found, strict=True)):
        score = one.outputs.score
        if args.json:
            record = {"index": index, "first": args.text, "second": other, "score": score}
            print(json.dumps(record, ensure_ascii=False))
        else:
            print(f"{score:.6f}")
    return 0
