"""Cost of a JSON schema: output tokens per second, time to the first token and its CPU time, with and without one.

    python benchmarks/structured_output.py --model DIR --load-format dummy --rows 64

All rows have the same schema, which is compiled before the first measurement. The kinds run in turns in one engine. A
model folder without a tokenizer gets a made-up one: all bytes, and random words up to the size of the vocabulary.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import string
import sys
import tempfile
import time
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from slipstream import LLM, SamplingParams, StructuredOutputsParams
from slipstream.base.errors import SlipstreamError
from slipstream.serve.cli.bench import bench_options
from slipstream.serve.cli.flags import add_engine_flags, engine_options

ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "amount": {"type": "integer", "minimum": 0, "maximum": 100_000},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
        "address": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "amount", "tags", "address"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[64], metavar="N", help="(default: 64)")
    parser.add_argument("--input-len", type=int, default=128, metavar="N", help="(default: 128)")
    parser.add_argument("--output-len", type=int, default=256, metavar="N", help="(default: 256)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: 3)")
    add_engine_flags(parser)
    args = parser.parse_args()
    options = bench_options(engine_options(args), detokenize=True) | {"enable_prefix_caching": False}
    with tempfile.TemporaryDirectory() as made:
        model = Path(str(options["model"]))
        if not (model / "tokenizer.json").is_file():
            shutil.copytree(model, made, dirs_exist_ok=True)
            write_tokenizer(Path(made), json.loads((model / "config.json").read_text())["vocab_size"])
            options["model"] = made
        try:
            with LLM(**options) as llm:
                for num_rows in args.rows:
                    measure(llm, num_rows, args)
        except SlipstreamError as error:
            print(f"benchmarks/structured_output.py: {error}", file=sys.stderr)
            return 2
    return 0


def measure(llm: LLM, num_rows: int, args: argparse.Namespace) -> None:
    rng, vocab_size = random.Random(0), llm.config.model.info.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(args.input_len)] for _ in range(num_rows)]
    free = SamplingParams(temperature=1.0, seed=1, max_tokens=args.output_len, ignore_eos=True, detokenize=False)
    kinds = {"free": free, "schema": free.with_changes(structured_outputs=StructuredOutputsParams(json=SCHEMA))}
    rates = dict.fromkeys(kinds, 0.0)
    first = dict.fromkeys(kinds, float("inf"))
    host: dict[str, list[float]] = {kind: [] for kind in kinds}  # CPU seconds of a request of one token
    for trial in range(1 + args.repeats):  # the first one compiles and captures
        for kind, params in kinds.items():
            begin = time.perf_counter()
            results = llm.generate(prompts, params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            num = sum(len(result.outputs[0].token_ids) for result in results)
            begin, before = time.perf_counter(), time.process_time()
            llm.generate(prompts[:1], params.with_changes(max_tokens=1), use_tqdm=False)
            if trial:
                host[kind].append(time.process_time() - before)
                rates[kind] = max(rates[kind], num / seconds)
                first[kind] = min(first[kind], time.perf_counter() - begin)
    for kind in kinds:
        print(
            f"{num_rows:>5} rows {kind:<8}{rates[kind]:>10.0f} out/s{100 * (rates[kind] / rates['free'] - 1):>8.1f}%"
            f"   first token {1e3 * first[kind]:>7.2f} ms, CPU time {1e3 * statistics.median(host[kind]):>7.2f} ms",
            flush=True,
        )


def write_tokenizer(folder: Path, size: int) -> None:
    """Byte-level BPE without merges. The words are never made from text, but a model may sample them."""
    rng = random.Random(0)
    vocab = {char: number for number, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab["<eos>"] = len(vocab)
    while len(vocab) < size:
        word = "".join(rng.choices(string.ascii_letters, k=rng.randrange(2, 12)))
        vocab.setdefault(rng.choice(("", "Ġ")) + word, len(vocab))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


if __name__ == "__main__":
    raise SystemExit(main())
