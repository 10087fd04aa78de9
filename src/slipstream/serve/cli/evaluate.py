"""`slipstream eval`: perplexity of a model on a text, and its accuracy beside an unquantised model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.base.errors import UserError
from slipstream.serve.cli.flags import add_engine_flags, engine_options
from slipstream.serve.cli.generate import read_file
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.api.evaluation import Evaluation

_SET_HERE = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_pages", "enable_prefix_caching")
_PAGES_PER_TOKEN = 1 / 8  # more than any page size needs, and so few that two models fit one device


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "eval",
        help="measure perplexity, and the loss of accuracy by low-bit weights",
        description="Computes the perplexity of a text. With --reference it also compares the next-token distributions "
        "of the two models at every position: KL(reference || model) in nats, and how often the most likely token is "
        "the same. Both models are loaded at the same time.",
        usage="slipstream eval FILE [FILE ...] [--reference MODEL] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("files", nargs="+", metavar="FILE", help="a text in UTF-8; several are joined")
    command.add_argument(
        "--reference",
        metavar="MODEL",
        help="compare with this model, with dequantised weights; it may be the same as --model",
    )
    command.add_argument("--reference-dtype", metavar="DTYPE", default="auto", help="of the reference (default: auto)")
    command.add_argument("--window", type=int, metavar="N", default=512, help="tokens per prompt (default: 512)")
    command.add_argument("--positions", type=int, metavar="N", help="tokens of the text to use (default: all)")
    command.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(command, leave_out=_SET_HERE)
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    if args.window < 2 or (args.positions is not None and args.positions < 2):
        raise UserError("--window and --positions are at least 2: a token is predicted from the one before it")
    text = "\n".join(read_file(Path(name), "text") for name in args.files)
    shared: dict[str, Any] = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": args.window + 1,
        "max_model_len": args.window + 2,
        "num_pages": 64 + int(args.window * _PAGES_PER_TOKEN),
        "enable_prefix_caching": False,
    }
    options = engine_options(args)
    from slipstream.api.evaluation import DistributionReader, cut_windows, evaluate, token_ids  # imports torch

    with ExitStack() as models:
        llm = models.enter_context(closing(opener(**options, **shared)))
        windows = [
            window for window in cut_windows(token_ids(llm, text), args.window, args.positions) if len(window) > 1
        ]
        reference = None
        if args.reference is not None:
            other = {name: value for name, value in options.items() if name != "quantization"}
            other |= {"model": args.reference, "dtype": args.reference_dtype, "dequantize": True}
            reference = DistributionReader(models.enter_context(closing(opener(**other, **shared))))
        result = evaluate(DistributionReader(llm), windows, reference)
    print(json.dumps(dataclasses.asdict(result)) if args.json else describe(result))
    return 0


def describe(result: Evaluation) -> str:
    lines = [f"positions       {result.positions:>12,}", f"perplexity      {result.perplexity:>12.4f}"]
    if result.differences is not None:
        found = result.differences
        lines += [
            f"of reference    {result.reference_perplexity:>12.4f}",
            f"KL mean         {found.kl_mean:>12.3e} nats",
            f"KL 99%          {found.kl_p99:>12.3e}",
            f"KL max          {found.kl_max:>12.3e}",
            f"same top token  {found.top1:>12.2%}",
            f"logprob max     {found.logprob_max:>12.3e} (difference, tokens with a probability over 1e-4)",
        ]
    return "\n".join(lines)
