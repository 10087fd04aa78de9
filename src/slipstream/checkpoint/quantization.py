"""Quantization: how the weights of a checkpoint are quantised, read from its config.json.

`quantization_config` names a method; a method stores a weight as several tensors. What differs between methods is kept
in a few fields, so that the loader needs no method names. Which weights of the model are quantised follows from the
tensors that the checkpoint has (`nn/weights/stacked.py`), not from the lists of modules in the config.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from slipstream.base.errors import BadCheckpoint, InvalidOption, UnsupportedModel

Layout = Literal["online", "float8", "int8", "packed", "awq", "gptq", "mxfp4", "bnb"]
"""The tensors of a weight: `nn/weights/quantized_layouts.py`. online: an unquantised weight, quantised at load."""

INSTEAD = "the unquantised checkpoint or a GGUF file"


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    method: str  # as the checkpoint or the option names it
    layout: Layout
    bits: int
    group: int = 0  # columns that share a scale; 0: all of a row
    block_rows: int = 1  # rows that share a scale; 0: all of a tensor
    symmetric: bool = True  # False: a scale has a zero point
    static_inputs: bool = False  # FP8: the checkpoint has scales of the inputs
    quantizes_inputs: bool = False  # FP8: GEMMs of several rows quantise their inputs
    has_codebook: bool = False  # 4-bit codes mean the numbers of a table
    double_scales: bool = False  # bitsandbytes: scales are quantised too
    only_experts: bool = False  # layers without experts are not quantised
    has_order: bool = False  # GPTQ: each weight must have the group of each column

    @property
    def is_4_bit(self) -> bool:
        return self.bits == 4


ONLINE_FP8 = Quantization(method="fp8", layout="online", bits=8, quantizes_inputs=True)


def choose_quantization(option: str | None, stored: Quantization | None, is_gguf: bool) -> Quantization | None:
    """The method that the loader uses: the checkpoint's, or that of the option `quantization`."""
    if option is None or option == "none":
        return stored
    wanted = {"awq_marlin": "awq", "gptq_marlin": "gptq", "compressed_tensors": "compressed-tensors"}.get(
        option, option
    )
    if is_gguf:
        if wanted != "gguf":
            raise InvalidOption(f"quantization is {option!r}, and the model is a GGUF file; leave the option out")
        return None
    if stored is not None:
        if wanted != stored.method:
            raise InvalidOption(
                f"quantization is {option!r}, and the checkpoint is quantised by {stored.method}; leave the option out"
            )
        return stored
    if wanted != "fp8":
        raise InvalidOption(
            f"quantization is {option!r}, and the checkpoint is not quantised; only fp8 quantises at load; "
            "for other methods give a checkpoint that is quantised by them, or a .gguf file"
        )
    return ONLINE_FP8


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """From config.json; None: the checkpoint is not quantised. Raises UnsupportedModel for what is not supported."""
    for name in ("quantization_config", "compression_config"):
        given = config.get(name)
        if given is not None:
            break
    else:
        return None
    if not isinstance(given, dict):
        raise BadCheckpoint(f"{name} of config.json is {given!r}, not an object; download the model again")
    method = str(given.get("quant_method", "an unnamed method"))
    reader = _READERS.get(method)
    if reader is None:
        supported = ", ".join(sorted(_READERS))
        raise UnsupportedModel(
            f"the checkpoint is quantised by {method}, which is not supported (supported: {supported}); give {INSTEAD}"
        )
    try:
        return reader(method, given)
    except (TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(f"{name} of config.json has a wrong value: {error}") from None


def _read_fp8(method: str, given: Mapping[str, Any]) -> Quantization:
    if (kind := given.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _unsupported(method, f"fmt {kind}")
    scheme = given.get("activation_scheme", "dynamic")
    if scheme not in ("dynamic", "static"):
        raise _unsupported(method, f"activation_scheme {scheme}")
    static, block = scheme == "static", given.get("weight_block_size")
    if block is None:
        return Quantization(
            method=method, layout="float8", bits=8, block_rows=0, static_inputs=static, quantizes_inputs=True
        )
    rows, columns = _block(method, block)
    if static:
        raise _unsupported(method, "activation_scheme static with weight_block_size")
    return Quantization(method=method, layout="float8", bits=8, group=columns, block_rows=rows, quantizes_inputs=True)


def _read_fbgemm(method: str, given: Mapping[str, Any]) -> Quantization:
    return Quantization(method=method, layout="float8", bits=8, quantizes_inputs=True)


def _read_awq(method: str, given: Mapping[str, Any]) -> Quantization:
    if (version := str(given.get("version", "gemm")).lower()) != "gemm":
        raise _unsupported(method, f"version {version}")
    bits, group = _bits(method, given.get("bits", given.get("w_bit", 4)), (4,)), _group(given)
    # the tensors include zero points also if zero_point is false
    return Quantization(method=method, layout="awq", bits=bits, group=group, symmetric=False)


def _read_gptq(method: str, given: Mapping[str, Any]) -> Quantization:
    bits = _bits(method, given.get("bits", 4), (4, 8))
    if (kind := given.get("checkpoint_format", "gptq")) not in ("gptq", "gptq_v2"):
        raise _unsupported(method, f"checkpoint_format {kind}")
    # patterns are not matched: those of "-:" leave modules out, whose tensors say the same
    own = {name: value for name, value in (given.get("dynamic") or {}).items() if not name.startswith("-:")}
    _check_single_modules(method, "dynamic", own, given)
    return Quantization(
        method=method if kind == "gptq" else "gptq_v2",
        layout="gptq",
        bits=bits,
        group=_group(given),
        symmetric=bool(given.get("sym", True)),
        has_order=bool(given.get("desc_act", False)),
    )


def _read_auto_round(method: str, given: Mapping[str, Any]) -> Quantization:
    """AutoRound stores the tensors of other methods."""
    kind = str(given.get("packing_format", "auto_round"))
    reader = {"auto_gptq": _read_gptq, "auto_awq": _read_awq}.get(kind.removeprefix("auto_round:"))
    if reader is None or given.get("data_type", "int") != "int" or int(given.get("act_bits") or 16) < 16:
        numbers = f"{given.get('data_type', 'int')} weights and inputs of {given.get('act_bits') or 16} bits"
        raise _unsupported(method, f"packing_format {kind}, {numbers}")
    _check_single_modules(method, "extra_config", given.get("extra_config") or {}, given)
    return reader(method, given)


def _check_single_modules(
    method: str, field: str, modules: Mapping[str, Mapping[str, Any]], given: Mapping[str, Any]
) -> None:
    """Raises if settings of single modules differ from the checkpoint's. Modules of 16 bits are not quantised."""
    for name, settings in modules.items():
        if int(settings.get("bits") or 0) >= 16:
            continue
        changed = [key for key in ("bits", "group_size", "sym") if settings.get(key, given.get(key)) != given.get(key)]
        if changed:
            raise _unsupported(method, f"{field} (another {changed[0]} for {name})")


def _read_modelopt(method: str, given: Mapping[str, Any]) -> Quantization | None:
    """From config.json, or the older layout of hf_quant_config.json. Scales of a KV cache are tensors that are not
    read."""
    kind = given.get("quantization", given).get("quant_algo")
    if kind is None:  # only the KV cache
        return None
    if kind not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise _unsupported(method, f"quant_algo {kind}")
    is_static = kind == "FP8"  # with a scale per tensor
    return Quantization(
        method=method,
        layout="float8",
        bits=8,
        block_rows=0 if is_static else 1,
        static_inputs=is_static,
        quantizes_inputs=True,
    )


_OF_WEIGHTS = ("num_bits", "type", "strategy", "group_size", "symmetric", "block_structure")
"""Fields of a scheme that say how numbers are stored. Others, as the observer, say how they were found."""


def _is_fused(transform: Mapping[str, Any]) -> bool:
    """Whether a transform of compressed-tensors is part of the stored weights, so that nothing is left to compute."""
    return all(str(one.get("location")) in ("weight_input", "weight_output") for one in transform.get("apply", ()))


def _read_compressed(method: str, given: Mapping[str, Any]) -> Quantization:
    groups = [group for group in (given.get("config_groups") or {}).values() if group.get("weights")]
    schemes = [{name: group["weights"].get(name) for name in _OF_WEIGHTS} for group in groups]
    kinds = {str(group.get("format") or given.get("format") or "") for group in groups}
    if not schemes or any(scheme != schemes[0] for scheme in schemes) or len(kinds) > 1:
        raise _unsupported(method, f"{len(schemes)} different schemes of weights in config_groups")
    scheme, kind = {name: value for name, value in schemes[0].items() if value is not None}, kinds.pop()
    inputs = [group.get("input_activations") for group in groups]
    if not all(_is_fused(one) for one in ((given.get("transform_config") or {}).get("config_groups") or {}).values()):
        raise _unsupported(method, "a transform_config of activations")
    sparse = (given.get("sparsity_config") or {}).get("format", "dense")
    if sparse not in ("dense", ""):
        raise _unsupported(method, f"sparsity_config {sparse}")
    strategy, bits = scheme.get("strategy", "tensor"), int(scheme.get("num_bits", 8))
    group, block_rows = _strategy(method, strategy, scheme)
    symmetric = bool(scheme.get("symmetric", True))
    if kind in ("float-quantized", "naive-quantized") and scheme.get("type") == "float" and bits == 8:
        return Quantization(
            method=method,
            layout="float8",
            bits=8,
            group=group,
            block_rows=block_rows,
            static_inputs=any(one is not None and not one.get("dynamic", False) for one in inputs),
            quantizes_inputs=all(one is not None for one in inputs),
        )
    if scheme.get("type", "int") == "int" and kind in ("int-quantized", "naive-quantized") and bits == 8:
        return Quantization(
            method=method, layout="int8", bits=8, group=group, block_rows=block_rows, symmetric=symmetric
        )
    if scheme.get("type", "int") == "int" and kind == "pack-quantized" and bits in (4, 8):
        return Quantization(
            method=method,
            layout="packed",
            bits=bits,
            group=group,
            block_rows=block_rows,
            symmetric=symmetric,
        )
    raise _unsupported(method, f"format {kind} with {scheme.get('type', 'int')} weights of {bits} bits")


def _read_mxfp4(method: str, given: Mapping[str, Any]) -> Quantization:
    """gpt-oss: blocks of 32 numbers of FP4 (e2m1) with a power of two as their scale, for experts only."""
    return Quantization(method=method, layout="mxfp4", bits=4, group=32, has_codebook=True, only_experts=True)


def _read_bitsandbytes(method: str, given: Mapping[str, Any]) -> Quantization:
    """4-bit codes of a table (NF4 or FP4), a scale for each 64; a layer's own settings are in its `quant_state`."""
    if not given.get("load_in_4bit", given.get("_load_in_4bit")):
        raise _unsupported(method, "8 bits (load_in_8bit)")
    if (kind := given.get("bnb_4bit_quant_type", "fp4")) not in ("nf4", "fp4"):
        raise _unsupported(method, f"bnb_4bit_quant_type {kind}")
    if (storage := str(given.get("bnb_4bit_quant_storage") or "uint8")) != "uint8":
        raise _unsupported(method, f"bnb_4bit_quant_storage {storage}")
    double = bool(given.get("bnb_4bit_use_double_quant", False))
    return Quantization(method=method, layout="bnb", bits=4, group=64, has_codebook=True, double_scales=double)


_READERS: dict[str, Callable[[str, Mapping[str, Any]], Quantization | None]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "auto-round": _read_auto_round,
    "modelopt": _read_modelopt,
    "compressed-tensors": _read_compressed,
    "mxfp4": _read_mxfp4,
    "bitsandbytes": _read_bitsandbytes,
}


def _strategy(method: str, strategy: str, scheme: Mapping[str, Any]) -> tuple[int, int]:
    """Columns per scale and rows per scale."""
    if strategy == "tensor":
        return 0, 0
    if strategy == "channel":
        return 0, 1
    if strategy == "group":
        return _group(scheme), 1
    if strategy == "block":
        rows, columns = _block(method, scheme.get("block_structure"))
        return columns, rows
    raise _unsupported(method, f"strategy {strategy}")


def _block(method: str, block: Any) -> tuple[int, int]:
    rows, columns = map(int, block)
    if rows < 1 or columns < 16 or columns & (columns - 1):
        raise _unsupported(method, f"blocks of {rows} x {columns}")
    return rows, columns


def _group(given: Mapping[str, Any]) -> int:
    """0 for one scale per row."""
    size = int(given.get("group_size", given.get("q_group_size", 128)) or 0)
    if size == -1:
        return 0
    if size < 16 or size & (size - 1):
        raise BadCheckpoint(f"group_size of quantization_config is {size}; it must be a power of two from 16, or -1")
    return size


def _bits(method: str, bits: Any, supported: tuple[int, ...]) -> int:
    if int(bits) not in supported:
        raise _unsupported(method, f"{bits} bits")
    return int(bits)


def _unsupported(method: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"the checkpoint is quantised by {method} with {what}, which is not supported; give {INSTEAD}"
    )
