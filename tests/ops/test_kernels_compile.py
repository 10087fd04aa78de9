"""Kernels compile for a GPU that is not here. The interpreter runs Python, so it takes what the compiler refuses."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from child import child_env

PROGRAM = '''
import importlib

import kernel_builds
import triton
from kernel_builds import ATTENTION, BYTE, FLOAT, HALF, INT, LONG, build, encoders, of, recurrent, sample

ELEMENTWISE = "slipstream.ops.elementwise.triton"
NORM = "slipstream.ops.elementwise.norm_triton"


def rest():
    x = of(HALF, "x residual weight out total gate_up")
    whole = dict(SIZE=1000, ROWS=1, BLOCK=256, DEPENDENT=True)
    build(NORM, "_norm_kernel", x | {"x": FLOAT}, HEADS=1, PARTS=2, PER_HEAD=False, **whole)
    whole["PARTS"] = 1
    build(NORM, "_norm_kernel", x, HEADS=1, PER_HEAD=False, **whole)
    build(NORM, "_norm_kernel", x, HEADS=3, PER_HEAD=True, residual=None, total=None, **whole)
    del whole["PARTS"]
    build(ELEMENTWISE, "_gate_kernel", x, KIND=2, BLOCK=256, DEPENDENT=True)
    build(ELEMENTWISE, "_sparse_kernel", x | {"deviations": "fp32"}, BLOCK=2048, DEPENDENT=False)
    build(ELEMENTWISE, "_relu2_kernel", x, BLOCK=4096, DEPENDENT=False)
    build(ELEMENTWISE, "_sigmoid_kernel", x | {"gate": HALF}, BLOCK=4096, DEPENDENT=True)
    names = "computed next_tokens tables rows counts token_rows offsets host_ids ids positions lengths slots pages"
    x = of(LONG, names)
    blocks = dict(PAGE=16, TOKENS=128, PAGES=256, NEXT=5)
    drafts = dict(GROUPS=2, KEPT=1, ADVANCE=True)
    build("slipstream.ops.elementwise.step_inputs_triton", "_gather_kernel", x | {"kept": INT}, **drafts, **blocks)
    chunks = dict(counts=None, offsets=None, host_ids=None, kept=None, KEPT=-1, ADVANCE=False)
    build("slipstream.ops.elementwise.step_inputs_triton", "_gather_kernel", x, GROUPS=1, **chunks, **blocks)
    x = of(LONG, "next_tokens computed rows offsets positions tokens out_tokens table")
    x |= of(BYTE, "failed out_kept out_failed")
    build("slipstream.ops.sampling.drafts_triton", "_accept_kernel", x, WIDTH=5, DRAWS=8, DEPENDENT=True)
    build("slipstream.ops.sampling.drafts_triton", "_store_kernel", x, ROWS=128, DEPENDENT=True)
    x |= {"tokens": INT, "reach": "fp32", "out": LONG}
    match = dict(DRAFTS=4, WIDTH=5, PAGE=16, BLOCK=4096, AT_ONCE=4, DEPENDENT=True)
    alone = dict(offsets=None, out=None)
    build("slipstream.ops.sampling.drafts_triton", "_propose_kernel", x, SHORTEST=2, LONGEST=4, **alone, **match)
    build("slipstream.ops.sampling.drafts_triton", "_propose_kernel", x, SHORTEST=1, LONGEST=24, **match)
    x = of(INT, "starts first_positions saves chunks chunk_starts")
    blocks = dict(CHUNK=64, ROWS=512, ENTRIES=32, SAVES=64)
    build("slipstream.ops.recurrent.steps_triton", "_list_kernel", x, **blocks)
    build("slipstream.ops.recurrent.steps_triton", "_list_kernel", x, saves=None, **blocks)
    build("slipstream.ops.recurrent.steps_triton", "_clear_kernel", x | {"out": HALF}, TOKENS=8, BLOCK=1024)
    x |= of(INT, "table out slots seen_positions") | of(LONG, "rows offsets positions")
    build("slipstream.ops.recurrent.steps_triton", "_seen_kernel", x, PERIOD=4, ROWS=128)
    build("slipstream.ops.recurrent.steps_triton", "_bases_kernel", x, SINGLE=True, DRAWS=128)
    build("slipstream.ops.recurrent.steps_triton", "_bases_kernel", x, SINGLE=False, DRAWS=128, offsets=None)
    x = of(HALF, "embedding angles x rotary") | of(LONG, "ids positions") | {"scale": "fp32"}
    shape = dict(SIZE=1000, ANGLE_SIZE=256, BLOCK=256, DEPENDENT=True)
    build(ELEMENTWISE, "_look_up_kernel", x, SCALED=True, **shape)


def pool():
    x = of(HALF, "x") | of(INT, "starts begins") | of(FLOAT, "out") | of(LONG, "origins")
    build(ELEMENTWISE, "_sum_kernel", x, TOKENS=32, COLUMNS=128)
    build(ELEMENTWISE, "_sum_kernel", x, TOKENS=32, COLUMNS=128, begins=None, origins=None)


def products():
    x = of(HALF, "x weight bias out")
    linear = "slipstream.ops.gemm.linear."
    build(linear + "triton", "_batch_invariant_kernel", x, SIZE=1000, BLOCK_IN=64)
    x = of(FLOAT, "x weight out")
    build(linear + "triton", "_batch_invariant_kernel", x, SIZE=1000, BLOCK_IN=32, bias=None)
    x = of(HALF, "x residual norm weight bias out total normed") | {"partials": FLOAT, "arrived": INT}
    few = dict(IN=3000, BLOCK_OUT=4, BLOCK_IN=1024, DEPENDENT=True)
    build(linear + "gemv", "_gemv_kernel", x, ROWS=1, PADDED=1, GATE=1, bias=None, normed=None, **few)
    build(linear + "gemv", "_gemv_kernel", x, ROWS=1, PADDED=1, GATE=0, **few | {"IN": 1000})
    plain = dict.fromkeys(["norm", "residual", "total", "normed"])
    build(linear + "gemv", "_gemv_kernel", x, ROWS=2, PADDED=2, GATE=0, **plain, **few)
    stays = dict(BLOCK_OUT=4, BLOCK_IN=2048, BLOCKS=3, DEPENDENT=True)
    build(linear + "gemv", "_persistent_kernel", x, IN=2000, GATE=0, bias=None, **stays)
    some = dict(BLOCK_ROWS=16, PARTS=4, EVEN=True, DEPENDENT=True)
    whole = dict(GATE=1, SPLITS=1, WHOLE=True, BLOCK_OUT=16, BLOCK_IN=1024, partials=None, arrived=None)
    build(linear + "triton", "_skinny_mma_kernel", x, **some, **whole)
    split = dict(GATE=0, SPLITS=3, WHOLE=False, BLOCK_OUT=32, BLOCK_IN=256)
    build(linear + "triton", "_skinny_mma_kernel", x, **split, **some)
    quantized()
    heads = of(HALF, "x value weight rotary out keys values") | {"slots": LONG}
    shape = dict(ROTATED=24, KV_HEADS=8, PAGE=16, DIM=80, ROTARY=64, BLOCK_T=2, BLOCK_HALF=32)
    rope, block = "slipstream.ops.attention.rope_triton", dict(BLOCK_H=4, SMALL=True, REVERSED=False, DEPENDENT=True)
    build(rope, "_turn_kernel", heads, key_scales=None, value_scales=None, **block, **shape)
    fp8 = heads | of("*fp8e4nv", "keys values") | of(FLOAT, "key_scales value_scales")
    build(rope, "_turn_kernel", fp8, weight=None, **block, **shape)
    build(rope, "_turn_kernel", fp8, **block | {"SMALL": False, "REVERSED": True}, **shape)


def quantized():
    ops = "slipstream.ops.gemm.quantized."
    x = of(HALF, "x bias out") | of(FLOAT, "scale zeros partials scales given x_scale") | {"arrived": INT}
    fp8 = x | {"values": "*fp8e4nv"}
    some = dict(GATE=1, SPLITS=2, ROWS=16, OUTPUTS=64, DEPENDENT=True, bias=None)
    build(ops + "gemm", "_gemm_kernel", fp8 | {"x": "*fp8e4nv"}, **some, **rows(4096, 128))
    some |= dict(x_scale=None)
    many = dict(GATE=0, SPLITS=1, ROWS=128, OUTPUTS=128, DEPENDENT=False)
    many |= dict(partials=None, arrived=None)
    build(ops + "gemm", "_gemm_kernel", fp8 | {"x": "*fp8e4nv"}, **many, **blocks(4096, 128, 64))
    many |= dict(x_scale=None)
    build(ops + "gemm", "_gemm_kernel", fp8, **many, **blocks(4096, 128, 64))
    build(ops + "gemm", "_gemm_kernel", x | {"values": BYTE}, **some, **blocks(2048, 128, 64, 64, "zeros"))
    build(ops + "gemm", "_gemm_kernel", x | {"values": "*i8"}, **many, **blocks(4096, 16, 64))
    eight = x | {"out": "*fp8e4nv"} | of(HALF, "residual norm total")
    plain = dict.fromkeys(["residual", "norm", "total"])
    large, small = dict(REVERSED=True, DEPENDENT=False), dict(REVERSED=False, DEPENDENT=True)
    build(ops + "gemm", "_quantize_kernel", eight, PARTS=1, GATE=2, SIZE=3000, BLOCK=4096, **large, **plain)
    eight |= {"x": FLOAT}
    build(ops + "gemm", "_quantize_kernel", eight, PARTS=2, GATE=0, SIZE=64, BLOCK=64, **small, given=None)
    gguf = x | {"values": BYTE} | of("*fp16", "scale minima")
    build(ops + "gemm", "_gemm_kernel", gguf, **some, **blocks(2048, 32, 64, 64, "minima"))
    unused = ("SCALING", "PTX")
    four = {name: value for name, value in blocks(2048, 128, 128, 64, "zeros").items() if name not in unused}
    build(ops + "expand", "_dequantize_kernel", x | {"values": BYTE}, ROWS=32, **four | dict(RUN=64))
    coded = x | {"values": BYTE, "codebook": FLOAT}
    build(ops + "gemm", "_gemm_kernel", coded, **some, **blocks(2048, 64, 64, 64, "codebook"))


def rows(num_bytes, step):
    table = dict(BYTES=num_bytes, GROUP=num_bytes, GROUPS=1, HALF=0, ZERO=0, STEP=step, RUN=step, SCALING=2, EVEN=True)
    return table | dict(zeros=None, minima=None, codebook=None, FP4=False, PTX=False)


def blocks(num_bytes, group, step, half=0, with_=""):
    run = min(group, half or step)
    scaling = int(run == step and with_ != "minima")
    table = rows(num_bytes, step) | dict(GROUP=group, GROUPS=32, RUN=run, SCALING=scaling, EVEN=num_bytes % step == 0)
    others = dict(HALF=half, PTX=bool(half) and with_ != "codebook")
    return {name: value for name, value in table.items() if name != with_} | others


def quantized_experts():
    moe = "slipstream.ops.gemm.moe.quantized_gemm"
    x = of(HALF, "x bias out") | of(FLOAT, "scale zeros x_scale pair_weights codebook") | of(INT, "order table")
    tile = dict(PAIRS=16, OUTPUTS=64, DEPENDENT=True)
    into = dict(TOP_K=8, INWARD=True, GATED=True, GATE=0, pair_weights=None, bias=None)
    out = dict(TOP_K=8, INWARD=False, GATED=False, GATE=0)
    fp8 = x | of("*fp8e4nv", "x values")
    many = dict(PAIRS=128, OUTPUTS=128, DEPENDENT=False)
    build(moe, "_quantized_grouped_kernel", fp8, **into, **tile, **blocks(2048, 128, 128))
    build(moe, "_quantized_grouped_kernel", fp8, **into, **many, **blocks(2048, 128, 64))
    plain = dict(x_scale=None)
    build(moe, "_quantized_grouped_kernel", fp8 | {"x": HALF}, **out, **tile, **plain, **rows(768, 128))
    four = x | {"values": BYTE}
    mxfp4, awq = blocks(1440, 32, 64, 32, "codebook") | dict(FP4=True), blocks(1024, 128, 64, 64, "zeros")
    clamped = dict(TOP_K=4, INWARD=True, GATED=True, GATE=2, pair_weights=None)
    build(moe, "_quantized_grouped_kernel", four, order=None, **clamped, **tile, **plain, **mxfp4)
    build(moe, "_quantized_grouped_kernel", four, **clamped, **many | dict(PAIRS=64, OUTPUTS=64), **plain, **mxfp4)
    build(moe, "_quantized_grouped_kernel", four, **out, **tile, **plain, **awq)
    into |= dict(GATED=False, GATE=3)
    build(moe, "_quantized_grouped_kernel", x | {"values": "*i8"}, **into, **tile, **plain, **rows(768, 128))


def experts():
    moe = "slipstream.ops.gemm.moe."
    x = of(HALF, "logits x weight out") | of(FLOAT, "bias weights pair_weights")
    x |= {"scale": "fp32"} | of(HALF, "made shared gate") | of(INT, "ids order positions table counts totals offsets")
    rule = dict(TOP_K=6, PADDED_K=8, EXPERTS=64, RENORMALIZE=True, SIGMOID=True, GROUPS=8, KEPT_GROUPS=4, TOP2=True)
    build(moe + "triton", "_route_kernel", x | of(FLOAT, "weights") | {"slots": LONG}, DEPENDENT=True, **rule)
    plain = dict(SIGMOID=False, GROUPS=1, KEPT_GROUPS=1, TOP2=False, bias=None, slots=None)
    build(moe + "triton", "_route_kernel", x | of(FLOAT, "weights"), DEPENDENT=False, **rule | plain)
    build(moe + "sort", "_sort_kernel", x, BINS=256, SIZE=16, BLOCK=1024, DEPENDENT=True)
    build(moe + "sort", "_count_kernel", x, BINS=256, BLOCK=256)
    build(moe + "sort", "_offset_kernel", x, BINS=256, SIZE=128, BLOCKS=256, PADDED=True)
    build(moe + "sort", "_scatter_kernel", x, BLOCK=256)
    summed = dict(TOP_K=8, COLUMNS=1024, HIDDEN=2048, DEPENDENT=True)
    plain = dict.fromkeys(["residual", "norm", "sums"])
    own_gate = x | {"gate_weight": HALF}
    build(moe + "combine", "_combine_kernel", own_gate, gate=None, positions=None, **plain, **summed)
    normed = x | of(HALF, "residual norm sums")
    build(moe + "combine", "_combine_kernel", normed, x=None, gate_weight=None, **summed | {"COLUMNS": 2048})
    down = dict(TOP_K=8, IN=768, BLOCKS=3, OUTPUTS=4, INPUTS=256, HIDDEN=2048, DEPENDENT=True)
    build(moe + "gemv", "_down_kernel", x | of(HALF, "hidden"), **down)
    copies = of(HALF, "copies out weights made")
    routed = of(HALF, "x norm router coefficients out") | {"scale": "fp32"}
    build("slipstream.ops.gemm.altup.triton", "_route_kernel", routed, COPIES=4, COLUMNS=2048, OUTPUTS=16)
    build("slipstream.ops.gemm.altup.triton", "_predict_kernel", copies, COPIES=4, COLUMNS=512)
    build("slipstream.ops.gemm.altup.triton", "_correct_kernel", copies, COPIES=4, COLUMNS=512, ACTIVE=0)
    tile = dict(PAIRS=16, OUTPUTS=64, INPUTS=128, DEPENDENT=True)
    into = dict(TOP_K=8, INWARD=True, GATED=True, pair_weights=None)
    out = dict(TOP_K=1, INWARD=False, GATED=False, GATE=0)
    build(moe + "triton", "_grouped_kernel", x, EVEN=True, GATE=0, bias=None, **into, **tile)
    build(moe + "triton", "_grouped_kernel", x, EVEN=True, GATE=1, bias=None, order=None, **into, **tile)
    alone = tile | {"shared": None}
    build(moe + "triton", "_grouped_kernel", x | {"bias": HALF}, EVEN=False, GATE=2, **into, **alone)
    build(moe + "triton", "_grouped_kernel", x, EVEN=True, GATE=3, bias=None, **into | {"GATED": False}, **alone)
    build(moe + "triton", "_grouped_kernel", x, EVEN=False, bias=None, **out, **tile)
    build(moe + "triton", "_grouped_kernel", x | {"bias": HALF}, EVEN=True, **out, **alone)
    one = dict(TOP_K=8, GATE=0, DEPENDENT=True)
    inward = dict(IN=2048, INPUTS=2048, OUTPUTS=4, INWARD=True, GATED=True, **one)
    wave = dict(IN=2000, INPUTS=2048, TOP_K=8, GATE=0, AHEAD=4, DEPENDENT=True)
    build(moe + "gemv", "_gate_up_kernel", x, **wave)
    build(moe + "gemv", "_expert_gemv_kernel", x, shared=None, **inward)
    build(moe + "gemv", "_expert_gemv_kernel", x, IN=768, INPUTS=512, OUTPUTS=8, INWARD=False, GATED=False, **one)

    lora = "slipstream.ops.gemm.lora.triton"
    x = of(HALF, "x a b out inner") | of(FLOAT, "sums squares") | {"ids": LONG, "scale": "fp32"}
    x |= of(INT, "order tiles blocks arrived")
    few = dict(SPLITS=8, TOKENS=16, COLUMNS=16, INPUTS=512, PART=512, DEPENDENT=True)
    build(lora, "_shrink_kernel", x, PARTS=0, squares=None, **few)
    build(lora, "_shrink_kernel", x, PARTS=64, **few)
    build(lora, "_gather_kernel", x, TOKENS=16, RANK=16, DEPENDENT=True)
    tile = dict(ALL_RANKS=128, TOKENS=64, OUTPUTS=128, RANK=64, DEPENDENT=False)
    build(lora, "_expand_kernel", x, ADDS=True, ALIGNED=True, **tile)
    build(lora, "_expand_kernel", x, ADDS=False, ALIGNED=False, **tile)
    x |= of(HALF, "sums residual norm weighted")
    tile = dict(ALL_RANKS=16, TOKENS=16, OUTPUTS=128, RANK=16, ALIGNED=True, DEPENDENT=True)
    after, plain = "slipstream.ops.gemm.lora.after_gemm", dict.fromkeys(["residual", "norm", "weighted", "squares"])
    build(after, "_finish_kernel", x, GATE=0, **tile)
    build(after, "_finish_kernel", x, GATE=1, **tile, **plain)


def attention():
    x = of(HALF, "out query keys values sinks") | of(LONG, "table lengths host_ids") | of(FLOAT, "sums stats")
    x |= of(INT, "tile_records totals arrived singles shares starts") | of("fp32", "scale soft_cap")
    x |= of(INT, "singles_out shares_out tiles_out")
    shape = dict(KV_HEADS=8, GROUP=4, DIM=128, BLOCK_D=128, BLOCK_N=64, PAGE=16, WINDOW=0, SOFT_CAP=False)
    shape |= dict(REST=0, BLOCK_REST=0)
    fp8 = x | of("*fp8e4nv", "keys values") | of(FLOAT, "key_scales value_scales")
    build(ATTENTION + "decode", "_split_kernel", fp8, sinks=None, TILE=16, QUERIES=1, DEPENDENT=True, **shape)
    build(ATTENTION + "varlen", "_tile_kernel", fp8, sinks=None, TILE=64, **shape)
    shape |= dict(key_scales=None, value_scales=None)
    single = dict(TILE=16, QUERIES=1, DEPENDENT=True)
    drafted = dict(TILE=32, QUERIES=5, DEPENDENT=True)
    build(ATTENTION + "decode", "_split_kernel", x, sinks=None, **shape, **drafted)
    build(ATTENTION + "decode", "_split_kernel", x, **shape | dict(WINDOW=128), **single)
    capped = shape | dict(WINDOW=100, SOFT_CAP=True, sinks=None)
    build(ATTENTION + "varlen", "_tile_kernel", x, TILE=64, **capped)
    build(ATTENTION + "varlen", "_tile_kernel", x, TILE=128, **shape)
    latent = shape | dict(GROUP=16, DIM=512, BLOCK_D=512, REST=64, BLOCK_REST=64, BLOCK_N=32, sinks=None)
    build(ATTENTION + "decode", "_split_kernel", x, **latent, **single)
    build(ATTENTION + "varlen", "_tile_kernel", x, TILE=32, **latent)
    cuts = dict(KV_HEADS=8, PAGE=16, WINDOW=0, MIN_SPLIT=256, ONE_SPLIT=512, MAX_SPLITS=32, STEP=128)
    tiles = dict(HAS_STARTS=True, GROUP=4, TILE=128, TOGETHER=8192, CUT_SINGLES=True, BLOCK=256)
    build(ATTENTION + "tile_list", "_list_tiles_kernel", x, **tiles, **cuts)
    one_by_one = dict(QUERIES=1, BLOCK=256, WHOLE=False, DEPENDENT=False, host_ids=None)
    build(ATTENTION + "single_list", "_list_singles_kernel", x, **one_by_one, **cuts)
    build(ATTENTION + "single_list", "_list_singles_kernel", x, QUERIES=5, BLOCK=64, WHOLE=True, DEPENDENT=True, **cuts)


def hopper():
    """Kernels in Gluon, whose tensor copies are arguments too."""
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    def build(module, name, block_keys, registers, is_fp8=False, **constants):
        kernel = getattr(importlib.import_module(ATTENTION + module), name)
        boxes = min(constants["PAGE"], block_keys), 64 // constants["GROUP"]
        copy, copy_queries = (
            f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
            for box in ([rows, constants["DIM"]] for rows in boxes)
        )
        x = of(HALF, "out query") | of(copy, "keys values") | {"table": LONG, "scale": "fp32", "queries": copy_queries}
        x |= of(INT, "tile_records totals arrived singles shares") | of(FLOAT, "sums stats") | {"sinks": HALF}
        if is_fp8:
            box = [1, boxes[0], constants["DIM"]]
            copy = f"tensordesc<fp8e4nv{box},{gl.NVMMASharedLayout(min(constants['DIM'], 128), 8, 3)!r}>"
            copy_scales = f"tensordesc<fp32{[1, max(32, boxes[0])]},{gl.NVMMASharedLayout(0, 32, 2)!r}>"
            x |= of(copy, "keys values") | of(copy_scales, "key_scales value_scales")
        elif "key_scales" in kernel.arg_names:
            constants |= {"key_scales": None, "value_scales": None}
        constants |= {"KV_HEADS": 2, "BLOCK_N": block_keys}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
        options = {"num_warps": 4, "maxnreg": registers}
        source = GluonASTSource(kernel, signature, constants, attributes)
        kernel_builds.compile_source(source, options)
        print(name)

    def build_single(**constants):
        kernel = importlib.import_module(ATTENTION + "hopper_single")._single_kernel
        layout = gl.NVMMASharedLayout.get_default_for([16, 128], gl.bfloat16)
        x = of(f"tensordesc<bf16[16, 128],{layout!r}>", "keys values") | of(LONG, "slots table")
        x |= of(HALF, "out query_key value weight rotary key_pages value_pages") | of(INT, "singles arrived")
        x |= of(FLOAT, "sums stats") | of("fp32", "eps scale") | {"num_programs": "i32"}
        constants |= {"KV_HEADS": 8, "DIM": 128, "BLOCK_N": 128, "PAGE": 16, "STAGES": 3, "DEPENDENT": True}
        signature = {arg: "constexpr" if arg in constants else x[arg] for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 168})
        print("_single_kernel")

    def build_product(
        outputs, rows, gate, splits, more=0, groups=1, kind=gl.bfloat16, chunks=None, adapted=False, **constants
    ):
        kernel = importlib.import_module("slipstream.ops.gemm.linear.streaming_kernel").streaming_kernel
        width = 1024 // kind.primitive_bitwidth
        boxes = {"x": [rows, width], "weight": [outputs // 2 if gate else outputs if outputs % 64 == 0 else 16, width]}
        boxes |= {"more_x": [more, width]} if more else {}
        boxes |= {"adapters": [1, 16, width]} if adapted else {}
        x = {
            name: f"tensordesc<{kind}{box},{gl.NVMMASharedLayout.get_default_for(box, kind)!r}>"
            for name, box in boxes.items()
        }
        x |= of(HALF, "bias residual norm out weighted row_x") | of(FLOAT, "squares made partials") | {"arrived": INT}
        x |= of(FLOAT, "scale x_scale") | {"eps": "fp32"}
        constants |= {} if kind is gl.float8e4nv else {"scale": None, "x_scale": None}
        constants |= dict(zip(("CHUNKS", "OWN_CHUNKS"), chunks or (0, 0)))
        constants |= {"x": None, "x_scale": None} if chunks else {"row_x": None}
        constants |= {} if adapted else {"adapters": None}
        constants |= {"GATE": gate, "SPLITS": splits, "OUTPUTS": outputs, "ROWS": rows, "COPIES": 2, "STAGES": 2}
        constants |= {"DEPENDENT": True, "MORE_ROWS": more, "GROUPS": groups} | ({} if more else {"more_x": None})
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        options = {"num_warps": -(-outputs // 64) * 4, "maxnreg": 128 if groups == 3 else 96 if rows <= 64 else 168}
        kernel_builds.compile_source(source, options)
        print("streaming_kernel")

    def build_gate(gate, ahead):
        kernel = importlib.import_module("slipstream.ops.gemm.linear.gated_gemm_hopper")._gate_kernel
        boxes = {"x": [128, 64], "weight": [128, 64], "out": [64, 128]}
        x = {
            name: f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
            for name, box in boxes.items()
        }
        constants = {"GATE": gate, "AHEAD": ahead}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 168})
        print("_gate_kernel")

    def build_experts(gate):
        kernel = importlib.import_module("slipstream.ops.gemm.moe.gemm_hopper")._grouped_kernel
        boxes = {"x": [128, 64], "weight": [128, 64], "out": [64, 64]}
        x = {
            name: f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
            for name, box in boxes.items()
        }
        x |= of(INT, "order table") | {"pair_weights": FLOAT} | ({"x": HALF} if gate else {})
        constants = {"GATE": gate, "TOP_K": 8}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        aligned = [i for i, arg in enumerate(signature) if arg in ("x", "x_stride", "order", "table") and (gate or i)]
        source = GluonASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 168})
        print("_grouped_kernel")

    def build_streamed_experts(gate, **constants):
        kernel = importlib.import_module("slipstream.ops.gemm.moe.streaming_hopper")._streaming_kernel
        outputs = 64 if gate else 128
        boxes = {"x": [16, 64]} | of([32 if gate else 128, 64], "weight shared")
        x = {
            name: f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
            for name, box in boxes.items()
        }
        x |= {"out": HALF, "pair_weights": FLOAT} | of(INT, "ids used")
        constants |= {"GATE": gate, "TOP_K": 10, "OUTPUTS": outputs, "STAGES": 3, "AHEAD": 2, "DEPENDENT": True}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": outputs // 16, "maxnreg": 128})
        print("_streaming_kernel")

    def build_slices(gate, splits, rows, is_4_bit, groups=1, **constants):
        kernel = importlib.import_module("slipstream.ops.gemm.quantized.streaming_kernel").streaming_kernel
        describe = lambda kind, box, layout: f"tensordesc<{kind}{box},{layout!r}>"
        inputs = describe("bf16", [4, rows, 64], gl.NVMMASharedLayout(128, 16, 3))
        box = [4, 2, 32, 64] if gate else [4, 1, 64, 64]
        x = of(inputs, "x high_x") | {"weight": describe("u8", box, gl.NVMMASharedLayout(64, 8, 4))}
        x |= of(HALF, "bias out residual norm weighted") | of(FLOAT, "partials squares made")
        x |= {"arrived": INT, "scale": INT if is_4_bit else FLOAT, "eps": "fp32"}
        constants |= {"GATE": gate, "SPLITS": splits, "OUTPUTS": 64, "ROWS": rows, "WARPS": 4, "STAGES": 2}
        constants |= {"DEPENDENT": True, "GROUPS": groups} | ({} if is_4_bit else {"high_x": None})
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 128})
        print("streaming_kernel")

    def build_row(gate, splits, steps, outputs, warps, **constants):
        kernel = importlib.import_module("slipstream.ops.gemm.quantized.row").row_kernel
        describe = lambda kind, box, layout: f"tensordesc<{kind}{box},{layout!r}>"
        x = {"weight": describe("u8", [warps // 2, outputs // 32, 4, 8, 128], gl.NVMMASharedLayout(128, 8, 5))}
        x |= {"words": describe("i32", [warps, outputs // 32, 32], gl.NVMMASharedLayout(0, 32, 3))}
        x |= {"arrived": INT, "eps": "fp32"}
        x |= of(HALF, "x bias out residual norm weighted") | of(FLOAT, "partials squares made")
        constants |= {"GATE": gate, "SPLITS": splits, "STEPS": steps, "STAGES": 2}
        constants |= {"DEPENDENT": True, "OUTPUTS": outputs, "WARPS": warps}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": warps, "maxnreg": 64})
        print("row_kernel")

    def build_layer():
        kernel = importlib.import_module("slipstream.ops.gemm.quantized.layer_kernel").layer_kernel
        describe = lambda box: f"tensordesc<fp8e4nv{box},{gl.NVMMASharedLayout(128, 8, len(box))!r}>"
        x = of(describe([64, 128]), "o_weight down_weight next_weight") | {"gate_weight": describe([4, 2, 8, 128])}
        x |= of(HALF, "x residual feed_norm next_norm gated total out") | of(FLOAT, "o_parts down_parts")
        x |= of(FLOAT, "o_scale gate_scale down_scale next_scale") | {"arrived": INT, "next_units": "i32"}
        x |= of("fp32", "feed_eps next_eps")
        constants = {"O_IN": 4096, "HIDDEN": 4096, "FEED": 12288, "O_SPLITS": 2, "DOWN_SPLITS": 2}
        constants |= {"GATE": 1, "STAGES": 13, "DEPENDENT": True}
        signature = {arg: "constexpr" if arg in constants else x[arg] for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 168})
        print("layer_kernel")

    def build_pass():
        kernel = importlib.import_module("slipstream.ops.recurrent.ssm_hopper")._pass_kernel
        boxes = of([64, 64], "x scores out_tiles") | of([64, 128], "b c")
        x = {
            name: f"tensordesc<bf16{box},{gl.NVMMASharedLayout.get_default_for(box, gl.bfloat16)!r}>"
            for name, box in boxes.items()
        }
        x |= {"log_rows": f"tensordesc<fp32{[1, 256]},{gl.NVMMASharedLayout(0, 32, 2)!r}>", "out": HALF}
        x |= of(FLOAT, "logs d state") | of(INT, "slots starts first_positions seen_positions chunks chunk_starts")
        constants = {"HEADS": 32, "HEADS_OF_GROUP": 4}
        signature = {arg: "constexpr" if arg in constants else x.get(arg, "i32") for arg in kernel.arg_names}
        source = GluonASTSource(kernel, signature, constants, {})
        kernel_builds.compile_source(source, {"num_warps": 4, "maxnreg": 168})
        print("_pass_kernel")

    build_layer()
    build_pass()
    build_experts(1)
    build_experts(0)
    build_streamed_experts(1)
    build_streamed_experts(0, shared=None)
    build_gate(1, 2)
    build_gate(2, 0)
    build_gate(4, 2)
    added = dict.fromkeys(["residual", "norm", "weighted", "made"])
    whole = dict.fromkeys(["partials", "arrived"])
    build_product(64, 16, 1, 1, PARTS=20, **added, **whole)
    of_adapters = dict.fromkeys(["norm", "weighted", "made"])
    build_product(64, 64, 1, 1, PARTS=64, bias=None, **of_adapters, **whole)
    build_product(64, 64, 0, 1, adapted=True, PARTS=64, bias=None, **added, **whole)
    build_product(64, 64, 0, 2, adapted=True, PARTS=0, squares=None, bias=None, **added)
    build_product(64, 64, 0, 3, PARTS=0, squares=None, bias=None)
    build_product(128, 128, 2, 1, PARTS=0, squares=None, bias=None, **added, **whole)
    build_product(64, 64, 1, 1, 16, 3, PARTS=64, bias=None, **added, **whole)
    build_product(64, 64, 0, 6, 32, 3, PARTS=0, squares=None, bias=None)
    build_product(64, 64, 0, 2, 16, PARTS=0, squares=None, bias=None, **added, **whole)  # partial sums, not added
    build_product(48, 32, 0, 1, 8, PARTS=0, squares=None, bias=None, **added, **whole)
    fp8 = dict(PARTS=0, squares=None, bias=None, kind=gl.float8e4nv)
    build_product(64, 16, 1, 1, **fp8, **added, **whole)
    build_product(64, 32, 0, 2, **fp8, **added)
    build_product(128, 128, 0, 2, **fp8, **added, **whole)  # partial sums
    build_product(64, 128, 1, 1, 128, 3, **fp8, **added, **whole)
    build_product(64, 8, 1, 1, chunks=(2, 2), PARTS=64, bias=None, kind=gl.float8e4nv, **added, **whole)
    build_product(64, 8, 1, 1, 0, 3, chunks=(2, 2), PARTS=64, bias=None, kind=gl.float8e4nv, **added, **whole)
    build_product(64, 8, 0, 2, chunks=(6, 3), **fp8)
    build_slices(0, 2, 16, False, PARTS=0, squares=None, bias=None, **added)
    build_slices(1, 1, 8, True, PARTS=64, **added, **whole)
    build_slices(0, 4, 16, True, PARTS=0, squares=None, bias=None)
    build_slices(1, 1, 16, True, 3, PARTS=64, bias=None, **added, **whole)
    build_row(1, 1, 3, 64, 4, PARTS=64, bias=None, **added, **whole)
    build_row(0, 4, 2, 32, 8, PARTS=0, squares=None)
    single = dict(PAGE=16, DEPENDENT=True)
    plain = dict(WINDOW=0, sinks=None)
    build("hopper_decode", "_split_kernel", 64, 128, GROUP=3, DIM=128, QUERIES=5, STAGES=3, **plain, **single)
    build("hopper_decode", "_split_kernel", 128, 168, GROUP=8, DIM=64, QUERIES=1, STAGES=6, WINDOW=128, **single)
    build("hopper_decode", "_split_kernel", 64, 168, GROUP=8, DIM=256, QUERIES=1, STAGES=3, **plain, **single)
    fp8 = dict(is_fp8=True, GROUP=2)
    build("hopper_decode", "_split_kernel", 64, 80, DIM=128, QUERIES=1, STAGES=3, **fp8, **plain, **single)
    build("hopper_decode", "_split_kernel", 128, 168, DIM=64, QUERIES=5, STAGES=2, **fp8, **plain, **single)
    build_single(GROUP=4)
    build_single(GROUP=16, weight=None)
    tile = dict(TILE=128, STAGES=2)
    build("hopper_varlen", "_tile_kernel", 128, 168, GROUP=8, DIM=64, PAGE=64, WINDOW=128, **tile)
    build("hopper_varlen", "_tile_kernel", 64, 168, GROUP=8, DIM=256, PAGE=16, **tile, **plain)
    build("hopper_varlen", "_tile_kernel", 128, 168, GROUP=3, DIM=128, PAGE=16, queries=None, **tile, **plain)
    build("hopper_varlen", "_tile_kernel", 128, 168, DIM=128, PAGE=16, **fp8, **tile, **plain)
    build("hopper_varlen", "_tile_kernel", 128, 168, DIM=64, PAGE=128, WINDOW=128, **fp8, **tile)


sample()
rest()
pool()
products()
experts()
quantized_experts()
recurrent()
attention()
encoders()
if triton.__version__.startswith("3.6."):
    hopper()
'''


pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("extent", ["first language", pytest.param("whole", marks=pytest.mark.slow)])
def test_kernels_compile_for_hopper(tmp_path: Path, extent: str) -> None:
    program = tmp_path / "build.py"  # triton reads the source of what it compiles
    program.write_text(PROGRAM)
    env = child_env(str(Path(__file__).parent))
    env.pop("TRITON_INTERPRET", None)
    env["TRITON_DISABLE_LINE_INFO"] = "1"  # a quarter of the time
    # triton's own cache is left in place: what it holds of these very sources has compiled
    done = subprocess.run([sys.executable, str(program), extent], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.split()) >= 36
