"""Writes a GGUF file of a llama model with random weights in the kinds of a Q4_K_M file, for benchmarks.

    python benchmarks/random_gguf.py FILE.gguf [--layers 16 --hidden 1024 --ffn 3072 ...]

Q4_K, but Q6_K for the tied embedding, and for attn_v and ffn_down in half of the layers. `--kind` writes all matrices
in one kind instead. Blocks are drawn directly, with a spread that keeps activations near 1.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind

HEAD_DIM = 64
# of a block: weights, bytes, and the places of d and of the minimum
BLOCKS = {
    "Q4_0": (32, 18, 0, None), "Q4_1": (32, 20, 0, 2), "Q8_0": (32, 34, 0, None),
    "Q4_K": (256, 144, 0, 2), "Q5_K": (256, 176, 0, 2), "Q6_K": (256, 210, 208, None),
}  # fmt: skip
# the root mean square of a block's random weights if d is 1, and the minimum that makes their mean 0
SPREAD = {
    "Q4_0": (4.6, 0.0), "Q4_1": (4.6, -7.5), "Q8_0": (74.0, 0.0),
    "Q4_K": (257.0, 7.5), "Q5_K": (524.0, 15.5), "Q6_K": (1370.0, 0.0),
}  # fmt: skip


def random_blocks(kind: str, num_rows: int, num_columns: int, generator: np.random.Generator) -> np.ndarray:
    """[rows, bytes per row] uint8. With random scales of blocks too: any bytes are some weights."""
    size, num_bytes, scale_at, minimum_at = BLOCKS[kind]
    assert num_columns % size == 0, f"{kind} needs a multiple of {size} columns, here are {num_columns}"
    raw = generator.integers(0, 256, (num_rows, num_columns // size, num_bytes), np.uint8)
    spread, middle = SPREAD[kind]
    d = np.float32(num_columns**-0.5 / spread)
    raw[..., scale_at : scale_at + 2] = np.array([d], np.float16).view(np.uint8)
    if minimum_at is not None:
        raw[..., minimum_at : minimum_at + 2] = np.array([d * middle], np.float16).view(np.uint8)
    return raw.reshape(num_rows, -1)


def write(path: Path, args: argparse.Namespace) -> None:
    generator = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(args.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(args.hidden)
    writer.add_feed_forward_length(args.ffn)
    writer.add_head_count(args.heads)
    writer.add_head_count_kv(args.kv_heads)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_rope_freq_base(100_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(args.vocab)
    writer.add_tokenizer_model("no_vocab")

    def add(name: str, kind: str, num_rows: int, num_columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_blocks(kind, num_rows, num_columns, generator), raw_dtype=Kind[kind])

    norm = np.ones(args.hidden, np.float32)
    plain, better = (args.kind, args.kind) if args.kind else ("Q4_K", "Q6_K")
    queries, keys = args.heads * HEAD_DIM, args.kv_heads * HEAD_DIM
    add("token_embd", better, args.vocab, args.hidden)
    writer.add_tensor("output_norm.weight", norm)
    for layer in range(args.layers):
        some = better if layer % 2 == 0 else plain
        name = f"blk.{layer}"
        writer.add_tensor(f"{name}.attn_norm.weight", norm)
        writer.add_tensor(f"{name}.ffn_norm.weight", norm)
        add(f"{name}.attn_q", plain, queries, args.hidden)
        add(f"{name}.attn_k", plain, keys, args.hidden)
        add(f"{name}.attn_v", some, keys, args.hidden)
        add(f"{name}.attn_output", plain, args.hidden, queries)
        add(f"{name}.ffn_gate", plain, args.ffn, args.hidden)
        add(f"{name}.ffn_up", plain, args.ffn, args.hidden)
        add(f"{name}.ffn_down", some, args.hidden, args.ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="a GGUF file with random weights, for benchmarks")
    parser.add_argument("path", type=Path)
    parser.add_argument("--kind", choices=BLOCKS, help="one kind for all matrices; default: those of Q4_K_M")
    sizes = {"layers": 16, "hidden": 1024, "ffn": 3072, "heads": 16, "kv_heads": 4, "vocab": 49152}
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    args = parser.parse_args()
    write(args.path, args)
    print(f"{args.path}: {args.path.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
