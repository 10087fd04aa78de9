"""Kernels compile for a GPU that is not here. The interpreter runs Python, so it takes what the compiler refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = '''
import importlib

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

FLOAT, LONG, INT, BYTE, HALF = "*fp32", "*i64", "*i32", "*u8", "*bf16"
SAMPLE = "slipstream.ops.sample.triton."


def build(module, name, types, **constants):
    """`types` gives the tensors; every other argument is a number, or a constant."""
    kernel = getattr(importlib.import_module(module), name)
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, "fp32" if arg == "eps" else "i32")
        for arg in kernel.arg_names
    }
    aligned = [i for i, kind in enumerate(signature.values()) if kind != "constexpr" and kind != "fp32"]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    triton.compile(ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", 90, 32), {"num_warps": 4})
    print(name)


def of(kind, names):
    return dict.fromkeys(names.split(), kind)


def sample():
    x = of(FLOAT, "logits temperature floor tops limits peaks stats values total chosen top")
    x |= of(LONG, "keys tokens index slots picks rank top_ids row_keys positions ids")
    x |= of(INT, "places listed counts") | of(BYTE, "random failed in_prompt where")
    build(SAMPLE + "choose", "_chunk_kernel", x | {"logits": HALF}, CHUNK=256)
    build(SAMPLE + "choose", "_row_kernel", x, CHUNKS=64)
    build(SAMPLE + "noise", "_bits_kernel", x | {"out": INT}, BLOCK=256)
    build(SAMPLE + "noise", "_keys_kernel", x | {"out": LONG}, PURPOSE=0, BLOCK=256)
    build(SAMPLE + "edit", "_penalize_kernel", x, BLOCK=256)
    build(SAMPLE + "edit", "_forbid_kernel", x, BLOCK=64)
    build(SAMPLE + "edit", "_drop_kernel", x, BLOCK=256)
    build(SAMPLE + "floor", "_survey_kernel", x, SPAN=128, SPANS=2)
    build(SAMPLE + "floor", "_floor_kernel", x, ALL_SPANS=64, ALL_CHUNKS=8, SPAN=128, TILE=2, temperature=None)
    build(SAMPLE + "logprobs", "_chunk_kernel", x, SLOTS=8, CHUNK=256)
    build(SAMPLE + "logprobs", "_row_kernel", x, SLOTS=8, CHUNKS=64)


def rest():
    x = of(HALF, "x residual weight out total gate_up")
    whole = dict(SIZE=1000, ROWS=1, BLOCK=256)
    build("slipstream.ops.norm.triton", "_norm_kernel", x, HEADS=1, PER_HEAD=False, **whole)
    build("slipstream.ops.norm.triton", "_norm_kernel", x, HEADS=3, PER_HEAD=True, residual=None, total=None, **whole)
    build("slipstream.ops.activation.triton", "_gate_kernel", x, GELU=True, BLOCK=256)
    x = of(LONG, "computed last_token tables rows counts token_rows offsets given ids positions lengths slots pages")
    blocks = dict(PAGE=16, TOKENS=128, PAGES=256)
    build("slipstream.ops.rows.triton", "_gather_kernel", x, GROUPS=2, **blocks)
    build("slipstream.ops.rows.triton", "_gather_kernel", x, GROUPS=1, counts=None, offsets=None, given=None, **blocks)


sample()
rest()
'''


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    program = tmp_path / "build.py"  # triton reads the source of what it compiles
    program.write_text(PROGRAM)
    env = {**os.environ, "PYTHONPATH": "src", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(program)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) == 16
