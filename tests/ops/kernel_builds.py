"""Builds of kernels for a GPU that is not here: how one is compiled, and those of sampling, recurrent mixers
and encoders. `test_kernels_compile.py` runs them in a process without the interpreter, with the others: with the word
`whole` to machine code, else to the compiler's first language, which finds what is no Triton in a fifth of the time."""

from __future__ import annotations

import importlib
import re
import sys

import triton
from triton._C.libtriton import ir, llvm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend

TARGET = GPUTarget("cuda", 90, 32)
llvm.OPTIMIZE_O3 = llvm.OPTIMIZE_O1  # whether kernels compile does not depend on it, but a fifth of the time does

FLOAT, LONG, INT, BYTE, HALF = "*fp32", "*i64", "*i32", "*u8", "*bf16"
SAMPLE = "slipstream.ops.sampling."
ATTENTION = "slipstream.ops.attention."


def build(module, name, types, **constants):
    """`types` gives the tensors; every other argument is a number, or a constant. An argument that the kernel's first
    lines take apart, as in `x, y = tokens`, is a tuple of those."""
    kernel = getattr(importlib.import_module(module), name)
    tuples = {arg: names.split(", ") for names, arg in re.findall(r"^    (\w+(?:, \w+)+) = (\w+)$", kernel.src, re.M)}

    def kind_of(arg):
        return "constexpr" if arg in constants else types.get(arg, "fp32" if arg == "eps" else "i32")

    signature, named = {}, {}
    for i, arg in enumerate(kernel.arg_names):
        signature[arg] = tuple(map(kind_of, tuples[arg])) if arg in tuples else kind_of(arg)
        named |= {(i, j): name for j, name in enumerate(tuples[arg])} if arg in tuples else {(i,): arg}
    constants = {path: constants[arg] for path, arg in named.items() if arg in constants}
    aligned = [path for path, arg in named.items() if path not in constants and kind_of(arg) != "fp32"]
    attributes = {path: [["tt.divisibility", 16]] for path in aligned}
    # with 16 warps a thread has a quarter of the code of 4, which takes two thirds of the time
    compile_source(ASTSource(kernel, signature, constants, attributes), {"num_warps": 16})
    print(name)  # noqa: T201 - the test counts them


def compile_source(source, given):
    if "whole" in sys.argv:
        triton.compile(source, TARGET, given)
        return
    backend, context, stages = make_backend(TARGET), ir.context(), {}
    options = backend.parse_options(given | source.parse_options())
    ir.load_dialects(context)
    backend.load_dialects(context)
    helpers = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(TARGET, options, *helpers, context)
    backend.add_stages(stages, options, source.language)
    stages[source.ext](module, {})


def of(kind, names):
    return dict.fromkeys(names.split(), kind)


def sample():
    x = of(FLOAT, "logits temperature floor tops limits peaks stats values total chosen top")
    x |= of(LONG, "keys tokens index entries earlier picks rank top_ids row_keys rows positions ids")
    x |= of(INT, "chunk_ids listed counts") | of(BYTE, "random failed seen where")
    plain = dict.fromkeys(["counts", "seen", "entries", "values", "earlier"])
    plain["EARLIER"] = 0
    no_mask = dict.fromkeys(["bits", "mask_entries", "mask_index"])
    x |= of(INT, "bits mask_entries targets host_entries") | {"mask_index": LONG}
    half = x | {"logits": HALF}
    build(SAMPLE + "choose", "_chunk_kernel", half, CHUNK=1024, PART=256, SPAN=128, EARLIER=4, **no_mask)
    build(SAMPLE + "choose", "_chunk_kernel", half, CHUNK=1024, PART=256, SPAN=128, keys=None, **plain, **no_mask)
    greedy = dict(keys=None, floor=None, peaks=None, CHUNK=4096, PART=4096)
    build(SAMPLE + "choose", "_chunk_kernel", half, SPAN=128, EARLIER=4, **greedy)
    build(SAMPLE + "edit", "_fetch_kernel", x | of(INT, "table entries"), BLOCK=1024)
    drawn = half | {"ids": INT}
    build(SAMPLE + "choose", "_draw_kernel", drawn, BLOCK=1024, EARLIER=4, DEPENDENT=True, **no_mask)
    plain_draw = plain | {"temperature": None}
    build(SAMPLE + "choose", "_draw_kernel", drawn, BLOCK=1024, DEPENDENT=False, **plain_draw)
    build(SAMPLE + "choose", "_row_kernel", drawn, PARTS=64, DEPENDENT=True)
    build(SAMPLE + "floor", "_bits_kernel", x | {"out": INT}, BLOCK=256)
    build(SAMPLE + "floor", "_keys_kernel", x | {"out": LONG}, PURPOSE=0, BLOCK=256)
    build(SAMPLE + "edit", "_penalize_kernel", x, BLOCK=256, EARLIER=4)
    build(SAMPLE + "edit", "_penalize_kernel", x, BLOCK=256, earlier=None, EARLIER=0)
    build(SAMPLE + "edit", "_forbid_kernel", x, BLOCK=64, index=None)
    build(SAMPLE + "edit", "_count_kernel", x, BLOCK=128)
    build(SAMPLE + "edit", "_add_kernel", x | {"table": FLOAT}, BLOCK=256)
    build(SAMPLE + "edit", "_add_kernel", x | {"table": FLOAT}, BLOCK=256, index=None)
    build(SAMPLE + "edit", "_mask_bits_kernel", x | of(INT, "bits entries"), BLOCK=256)
    build(SAMPLE + "edit", "_forbid_kernel", x, BLOCK=64)
    build(SAMPLE + "edit", "_drop_kernel", x, BLOCK=256)
    spans = dict(ALL_SPANS=64, ALL_CHUNKS=8, SPAN=128, TILE=2)
    build(SAMPLE + "floor", "_survey_kernel", x, SPAN=128, SPANS=2, EARLIER=4)
    build(SAMPLE + "floor", "_survey_kernel", x, SPAN=128, SPANS=2, **plain)
    build(SAMPLE + "floor", "_floor_kernel", x, EARLIER=4, **spans)
    build(SAMPLE + "floor", "_floor_kernel", x, temperature=None, **spans, **plain)
    build(SAMPLE + "triton", "_chunk_kernel", x, PADDED_K=8, CHUNK=256)
    build(SAMPLE + "triton", "_row_kernel", x, PADDED_K=8, CHUNKS=64)


def recurrent():
    x = of(HALF, "x weight bias state out")
    x |= of(INT, "slots starts first_positions seen_positions chunks chunk_starts save_slots")
    conv = "slipstream.ops.recurrent.conv1d_triton"
    build(conv, "_chunk_kernel", x, SILU=True, WIDTH=4, RING=4, TOKENS=8, CHANNELS=1024, bias=None)
    build(conv, "_chunk_kernel", x, SILU=False, WIDTH=3, RING=12, TOKENS=8, CHANNELS=512)
    x |= of(INT, "offsets save_positions bases counts replay") | {"replay": HALF}
    plain = dict(offsets=None, save_positions=None)
    build(conv, "_step_kernel", x, SILU=True, WIDTH=4, RING=4, CHANNELS=128, bias=None, **plain)
    build(conv, "_step_kernel", x, SILU=True, WIDTH=4, RING=4, CHANNELS=128, save_slots=None, **plain)
    build(conv, "_step_kernel", x, SILU=True, WIDTH=4, RING=13, CHANNELS=128)
    build(conv, "_store_kernel", x, WIDTH=4, RING=4, CHANNELS=128, save_slots=None, save_positions=None)
    build(conv, "_store_kernel", x, WIDTH=4, RING=13, CHANNELS=128)
    delta = "slipstream.ops.recurrent."
    x |= of(HALF, "a b z gate q k v keys values scores out qkv conv conv_state norm")
    x |= of(FLOAT, "a_log dt_bias g beta state made deferred") | {"scale": "fp32"} | of(INT, "arrived")
    build(delta + "delta_parts", "_gates_kernel", x, HEADS=32, ROWS=16, BLOCK=32)
    gated = "slipstream.ops.elementwise.norm_triton"
    groups = dict(GROUPS=8, SIZE=1024, ROWS=2, BLOCK=1024)
    build(gated, "_gated_norm_kernel", x, PER_GROUP=True, NORM_FIRST=False, **groups)
    build(gated, "_gated_norm_kernel", x, PER_GROUP=False, NORM_FIRST=True, **groups)
    build(gated, "_gated_norm_kernel", x, PER_GROUP=True, NORM_FIRST=False, weight=None, **groups)
    sizes = dict(HEADS=32, GROUP=2, KEY_DIM=128, DIM=128, KEY_BLOCK=128, CHUNK=64, L2_EPS=1e-6, NORM=True)
    build(delta + "delta_triton", "_factors_kernel", x, BLOCK=128, **sizes)
    defers = dict(PERIOD=4, ENTRY=260)
    stores = dict(PERIOD=1, ENTRY=0, deferred=None)
    build(delta + "delta_triton", "_pass_kernel", x, BLOCK=32, save_slots=None, **sizes, **stores)
    build(delta + "delta_triton", "_pass_kernel", x, BLOCK=64, save_slots=None, **sizes, **defers)
    single = dict.fromkeys(["chunks", "chunk_starts", "keys", "values", "scores"])
    build(delta + "delta_triton", "_pass_kernel", x, BLOCK=32, **single, **sizes, **stores)
    shape = dict(HEADS=32, GROUP=2, KEY_SIZE=2048, KEY_DIM=128, DIM=128, WIDTH=4, SCALE=0.1, L2_EPS=1e-6)
    shape |= dict(KEY_BLOCK=128, WHOLE=128, DEPENDENT=True)
    whole = dict(BLOCK=64, SPLITS=1, DEFERRED=False, arrived=None)
    build(delta + "delta_decode_kernel", "_decode_kernel", x, **whole, **shape, **stores)
    build(delta + "delta_decode_kernel", "_decode_kernel", x, **whole, **shape, **defers)
    build(
        delta + "delta_decode_kernel",
        "_decode_kernel",
        x,
        BLOCK=64,
        SPLITS=2,
        DEFERRED=False,
        save_slots=None,
        **shape,
        **defers,
    )
    parts = dict(BLOCK=32, SPLITS=4, DEFERRED=True)
    build(delta + "delta_parts", "part_kernel", x, **parts, **shape, **defers)
    build(delta + "delta_parts", "part_kernel", x, save_slots=None, **parts, **shape, **stores)
    shape = {key: shape[key] for key in shape if key not in ("WHOLE", "DEPENDENT")} | dict(RING=13, REPLAY=10, BLOCK=32)
    build(delta + "delta_verify", "_verify_kernel", x | {"out": FLOAT}, **shape)
    build(delta + "delta_verify", "_verify_kernel", x, **dict.fromkeys(["qkv", "b", "a", "out"]), **shape)
    x |= of(HALF, "x dt b c z") | of(FLOAT, "d dt_min dt_max") | {"dt_min": "fp32", "dt_max": "fp32"}
    ssm = "slipstream.ops.recurrent."
    heads = dict(HEADS=80, HEADS_OF_GROUP=10, STATE=128, PADDED_STATE=128)
    build(ssm + "ssm_triton", "_ssd_kernel", x, DIM=64, BLOCK=32, **heads)
    build(ssm + "ssm_triton", "_ssd_kernel", x, DIM=64, BLOCK=32, save_slots=None, **heads)
    for draws in (True, False):
        lines = dict(COLUMNS=10, DRAWS=draws)
        build(ssm + "ssm_verify", "_ssd_kernel", x, DIM=64, BLOCK=32, SIZE=5120 + 1024 + 80, **lines, **heads)
        channels = dict(CHANNELS=5120, STATE=16, BLOCK=64, PADDED_STATE=16, SIZE=10256)
        build(ssm + "ssm_verify", "_selective_kernel", x, **lines, **channels)
    x |= of(FLOAT, "sizes totals logs")
    heads |= dict(CHUNK=64, PRECISION="tf32x3")
    build(ssm + "ssm_chunked", "_factors_kernel", x, BLOCK=16, **heads)
    build(ssm + "ssm_chunked", "_pass_kernel", x, DIM=64, BLOCK=64, SINGLE=False, **heads)
    build(ssm + "ssm_chunked", "_pass_kernel", x, DIM=64, BLOCK=64, SINGLE=True, **heads)
    x |= of(FLOAT, "x b c dt scores out")
    build(ssm + "ssm_chunked", "_factors_kernel", x, BLOCK=16, logs=None, **heads)
    build(ssm + "ssm_chunked", "_pass_kernel", x, DIM=64, BLOCK=16, SINGLE=False, **heads)
    x |= of(HALF, "x b c dt out")
    chunked, single = dict(save_slots=None), dict(chunks=None, chunk_starts=None)
    channels = dict(CHANNELS=5120, STATE=16, BLOCK=64, PADDED_STATE=16)
    for step in (chunked | {"TOKENS": 4}, single | {"TOKENS": 1}, single | chunked | {"TOKENS": 1}):
        build(ssm + "ssm_triton", "_selective_kernel", x, **channels, **step)


def encoders():
    x = of(HALF, "x residual weight bias out total query key value of_queries of_keys") | {"scale": "fp32"}
    x |= of(INT, "records starts begins num_seen")
    build("slipstream.ops.elementwise.norm_triton", "_layer_norm_kernel", x, SIZE=1000, ROWS=1, BLOCK=1024)
    build("slipstream.ops.elementwise.triton", "_row_kernel", x | {"out": FLOAT}, BLOCK=512, ADDS=False)
    build("slipstream.ops.elementwise.triton", "_row_kernel", x | {"out": FLOAT}, BLOCK=512, begins=None, ADDS=True)
    build("slipstream.ops.attention.bidirectional_triton", "_list_tiles_kernel", x, SIZE=128, BLOCK=256)
    build("slipstream.ops.attention.bidirectional_triton", "_list_tiles_kernel", x, num_seen=None, SIZE=128, BLOCK=256)
    shape = dict(HEADS=12, GROUP=1, BLOCK_M=128, BLOCK_N=64)
    whole = "slipstream.ops.attention.bidirectional_triton"
    plain = dict.fromkeys(("of_queries", "of_keys"))
    build(whole, "_attend_kernel", x, bias=None, REACH=0, DIM=64, BLOCK_D=64, **shape, **plain)
    build(whole, "_attend_kernel", x, REACH=64, DIM=96, BLOCK_D=128, **shape | dict(BLOCK_M=64), **plain)
    build(whole, "_attend_kernel", x, bias=None, REACH=0, DIM=64, BLOCK_D=64, **shape)
