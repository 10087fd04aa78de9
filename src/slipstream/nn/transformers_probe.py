"""Finds the attention layers of a module of the transformers library by running it without memory.

The module is built on the meta device and computes a few tokens there. Its attention layers call the function that is
registered in `AttentionInterface`; the probe records sizes, scales, windows, soft caps and sinks of each call. The
library makes its masks in the probe only: they are compared with what paged attention reads. What the paged attention
of this package cannot do is refused here, by name.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.base.errors import UnsupportedModel
from slipstream.checkpoint.architecture import continues_text
from slipstream.device.sync_check import sync_allowed

NAME = "slipstream"
"""Of our function in the library's `AttentionInterface`."""
_PROBE_NAME = "slipstream_probe"  # the same with masks
_HANDLER = "_slipstream_attention"  # attribute of every module: what its attention calls go to
_PADDING_CHECK = "warn_if_padding_and_no_attention_mask"
_POSITION_TENSORS = ("position_ids", "cache_position", "s_aux")
_KINDS = ("full_attention", "sliding_attention", "attention")
_MOVING_ROPES = ("dynamic", "longrope")
_NUM_TOKENS = 5
_MASK_FILE = "masking_utils.py"  # of the library: what makes masks runs in the probe only
# what every element of a mask is in the probe, besides the window (0: all positions) of a causal one
_ALL, _OTHER = -1, -2


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of attention; calls are cache sites, in order."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # of queries and keys; values are padded to it
    value_dim: int
    scale: float
    window: int
    soft_cap: float
    sinks: bool
    causal: bool


@dataclass(frozen=True, slots=True)
class Probe:
    calls: tuple[AttentionCall, ...]
    waits: tuple[str, ...]  # places in the library's code at which the host waits for the device


def load_config(folder: str) -> Any:
    """The library's config of a folder. Raises UnsupportedModel."""
    try:
        import transformers
    except ImportError:
        raise UnsupportedModel(
            "modules of the transformers library need it installed: pip install 'slipstream[transformers]'"
        ) from None
    try:
        kind = transformers.PretrainedConfig.get_config_dict(folder, local_files_only=True)[0].get("model_type")
        if kind is not None and kind not in transformers.CONFIG_MAPPING:
            raise UnsupportedModel(f"transformers {transformers.__version__} has no model_type {kind!r:.100}")
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except UnsupportedModel:
        raise
    except Exception as error:  # whatever the library's code raises for a field
        raise UnsupportedModel(f"the transformers library cannot read its config.json: {_first_line(error)}") from None


def find_class(config: Any) -> Any:
    """The library's causal LM or encoder for a config. Raises UnsupportedModel."""
    import transformers

    name = (config.architectures or [""])[0]
    kind = getattr(transformers, name, None)
    if kind is None or not hasattr(kind, "base_model_prefix"):
        raise UnsupportedModel(f"the transformers library has no decoder or encoder {name!r}")
    is_known = continues_text(name) or is_classifier(name) or name.endswith("Model")
    if continues_text(name) != hasattr(kind, "generate") or not is_known:
        raise UnsupportedModel(
            f"{name} of the transformers library is neither a causal LM nor a classifier of texts or tokens nor a "
            "model that ends with its hidden states, which are what its modules are run for"
        )
    if not getattr(kind, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{name} of the transformers library does not support other attention functions")
    return kind


def is_classifier(architecture: str) -> bool:
    """Whether the model has scores of classes behind its hidden states."""
    return architecture.endswith(("ForSequenceClassification", "ForTokenClassification"))


def new_module(config: Any, dtype: torch.dtype, name: str = NAME) -> Any:
    """The library's module on the meta device, whose attention is ours. `name`: of the attention function."""
    register()
    kind = find_class(config)
    config._attn_implementation = name
    try:
        with torch.device("meta"):
            module = kind._from_config(config, dtype=dtype)
    except Exception as error:  # whatever the library's code raises for a configuration
        raise UnsupportedModel(
            f"{kind.__name__} is not an architecture of slipstream, and the transformers library does not accept its "
            f"configuration: {error}"
        ) from None
    return module.eval()


def base_of(module: Any) -> Any:
    """The part before the projection to tokens."""
    base = getattr(module, module.base_model_prefix, None) or getattr(module, "model", None)
    if base is None and not continues_text(type(module).__name__):
        base = module
    if not isinstance(base, nn.Module):
        raise UnsupportedModel(f"{type(module).__name__} does not separate its layers from the projection to tokens")
    return base


def register() -> None:
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)
    ALL_ATTENTION_FUNCTIONS.register(_PROBE_NAME, _attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PROBE_NAME, _mask_of)


def handle_attention(module: nn.Module, handler: Any) -> None:
    """Attention calls of all modules inside go to this function from now on. A check of the library that only warns,
    and reads token ids on the host for it, is turned off: rows have no padding."""
    for inner in module.modules():
        inner.__dict__[_HANDLER] = handler
        if hasattr(inner, _PADDING_CHECK):
            inner.__dict__[_PADDING_CHECK] = _no_check


def _no_check(*args: Any, **kwargs: Any) -> None:
    """In place of the library's check for padding."""


def _attend(module: Any, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    return getattr(module, _HANDLER)(module, *args, **kwargs), None


@functools.lru_cache(maxsize=8)
def probe(folder: str) -> Probe:
    """Runs the model of a folder on the meta device. Raises UnsupportedModel."""
    config = load_config(folder)
    _check_config(config)
    # grouped GEMMs of experts take no float32 on the meta device
    module = new_module(config, torch.bfloat16, _PROBE_NAME)
    length = max_positions(config)
    calls: list[AttentionCall] = []

    def record(
        layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any = None, **kwargs: Any
    ) -> torch.Tensor:
        mask = kwargs.pop("attention_mask", mask)
        calls.append(_with_mask(_read_call(layer, query, key, value, kwargs), layer, mask, length))
        return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1])

    handle_attention(module, record)
    _check_positions(module)
    finder = WaitFinder(exempt=_MASK_FILE)
    with torch.device("meta"), torch.no_grad(), finder:
        ids, positions = torch.zeros(1, _NUM_TOKENS, dtype=torch.int64), torch.arange(_NUM_TOKENS).unsqueeze(0)
        try:
            hidden_of(base_of(module), positions, input_ids=ids)
        except UnsupportedModel:
            raise
        except Exception as error:  # whatever the library's code raises
            raise UnsupportedModel(
                f"{type(module).__name__} of the transformers library does not run on packed tokens: "
                f"{_first_line(error)}"
            ) from None
    if not calls:
        raise UnsupportedModel(f"{type(module).__name__} has no attention that goes through the attention interface")
    if len({call.causal for call in calls}) > 1:
        raise UnsupportedModel(f"{type(module).__name__} has layers of both causal and bidirectional attention")
    if not calls[0].causal and any(call.sinks or call.soft_cap or call.window for call in calls):
        raise UnsupportedModel(f"{type(module).__name__} has bidirectional attention with windows, caps or sinks")
    return Probe(tuple(calls), tuple(finder.locations))


def position_offset(base: Any) -> int:
    """The position of a text's first token in the position table. Modules like RoBERTa's skip the rows up to that of
    the padding token, if the caller gives no positions."""
    embeddings: Any = getattr(base, "embeddings", None)
    if not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return 0
    return int(embeddings.padding_idx) + 1


def _check_positions(module: Any) -> None:
    """Raises if a module would number the tokens of a step itself, as if they were of one text."""
    if "position_ids" not in inspect.signature(base_of(module).forward).parameters:
        raise UnsupportedModel(f"{type(module).__name__} of the transformers library takes no position_ids")


def hidden_of(base: Any, positions: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Hidden states of tokens at `positions` [1, T]. `inputs`: input_ids [1, T] or inputs_embeds [1, T, hidden]."""
    found = base(**inputs, position_ids=positions, use_cache=False, return_dict=True)
    hidden: torch.Tensor = found.last_hidden_state
    return hidden


def _read_call(
    layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kwargs: dict[str, Any]
) -> AttentionCall:
    name = type(layer).__name__
    causal = kwargs.get("is_causal")
    causal = bool(getattr(layer, "is_causal", True) if causal is None else causal)
    others = [key_ for key_, given in kwargs.items() if torch.is_tensor(given) and key_ not in _POSITION_TENSORS]
    if others:
        raise UnsupportedModel(f"{name} gives attention a tensor {others[0]}, which paged attention does not read")
    if query.shape[2] != _NUM_TOKENS or key.shape[2] != _NUM_TOKENS or query.shape[0] != 1:
        raise UnsupportedModel(f"{name} changes the number of tokens before attention")
    scale = kwargs.get("scaling")
    return AttentionCall(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        value_dim=value.shape[3],
        scale=query.shape[3] ** -0.5 if scale is None else float(scale),
        window=int(kwargs.get("sliding_window") or 0),
        soft_cap=float(kwargs.get("softcap") or 0.0),
        sinks=kwargs.get("s_aux") is not None,
        causal=causal,
    )


def _with_mask(call: AttentionCall, layer: Any, mask: Any, length: int) -> AttentionCall:
    """The call with the window that the library puts into its mask. Raises if paged attention reads other positions of
    a text of up to `length` tokens."""
    if mask is None:  # of decoders that rely on `is_causal`
        return call
    kinds = []
    if torch.is_tensor(mask) and not mask.is_meta and mask.dtype == torch.int64:
        with sync_allowed("the probe runs before weights are loaded, and its masks lie on the CPU"):
            kinds = mask.unique().tolist()
    kind = kinds[0] if len(kinds) == 1 else _OTHER
    hides = 0 < call.window < length
    if kind == _OTHER or (kind == _ALL) == call.causal or (hides and kind != call.window):
        raise UnsupportedModel(
            f"{type(layer).__name__} of the transformers library masks positions that paged attention reads, or reads "
            f"ones that it masks (paged attention is {'causal' if call.causal else 'bidirectional'}, "
            f"{f'with a window of {call.window}' if call.window else 'without a window'})"
        )
    return replace(call, window=call.window or max(kind, 0))


def _mask_of(mask_function: Any = None, config: Any = None, **kwargs: Any) -> torch.Tensor:
    """The library's mask in the probe: what it masks up to the last position, in every element. A mask of padding is
    left out: rows have none."""
    shape = 1, 1, kwargs["q_length"], kwargs["kv_length"]
    try:
        kind = _kind_of(mask_function, max_positions(config))
    except Exception:  # a mask of values that the probe does not have
        kind = _OTHER
    return torch.full(shape, kind, dtype=torch.int64, device="cpu")


def _kind_of(mask_function: Any, length: int) -> int:
    """`mask_function`: of the indices of text, head, query and key."""
    keys = torch.arange(length, device="cpu").view(1, 1, 1, -1)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device="cpu")
    rows = {
        at: mask_function(zero, zero, zero + at, keys).expand(keys.shape).flatten()
        for at in sorted({0, 1, 2, length // 3, length // 2, length - 2, length - 1} & set(range(length)))
    }
    num_seen = int(rows[length - 1].sum())
    keys = keys.flatten()
    for kind in (_ALL, 0, num_seen):
        if all(torch.equal(row, _seen(kind, at, keys)) for at, row in rows.items()):
            return kind
    return _OTHER


def _seen(kind: int, at: int, keys: torch.Tensor) -> torch.Tensor:
    """The keys that paged attention reads at a position."""
    if kind == _ALL:
        return torch.ones_like(keys, dtype=torch.bool)
    return (keys <= at) & (keys > at - kind) if kind else keys <= at


def max_positions(config: Any) -> int:
    return first_int(config.get_text_config(), ("max_position_embeddings", "n_positions"), 2048)


def first_int(config: Any, names: tuple[str, ...], default: int) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), default)


def _check_config(config: Any) -> None:
    text = config.get_text_config()
    name = (config.architectures or [""])[0]
    for kind in getattr(text, "layer_types", None) or ():
        if kind not in _KINDS:
            raise UnsupportedModel(
                f"{name} has layers of type {kind}; with transformers' module we run full and window"
            )
    ropes = getattr(text, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if rope.get("rope_type") in _MOVING_ROPES:
            raise UnsupportedModel(
                f"{name} has a rope of type {rope['rope_type']}, which transformers' module chooses by the longest "
                "request of a batch"
            )
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{name} is quantised; transformers' module is run with plain weights")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


# Finds where a module of the transformers library waits for the device, by running it on the meta device.
#
# A value that Python reads from a tensor (`item`, a tensor as a condition, `nonzero`) makes the host wait on a GPU, and
# such a step cannot be captured in a CUDA graph. On the meta device there is no value: `WaitFinder` notes the place in
# the library's code and continues with a value of its own.

_aten = torch.ops.aten


class WaitFinder(TorchDispatchMode):
    def __init__(self, exempt: str) -> None:
        """`exempt`: a file whose waits do not count."""
        super().__init__()
        self.exempt = exempt
        self.locations: dict[str, None] = {}  # in order, each once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        answer = _ANSWERS.get(func)
        if answer is None or not args[0].is_meta:
            return func(*args, **(kwargs or {}))
        location = _location()
        if not location.startswith(f"{self.exempt}:"):
            self.locations[location] = None
        return answer(args[0])


def _scalar(x: torch.Tensor) -> bool | int | float:
    if x.dtype is torch.bool:
        return True
    return 1.0 if x.dtype.is_floating_point else 1


def _all_indices(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device="meta")


_ANSWERS = {
    _aten._local_scalar_dense.default: _scalar,
    _aten.nonzero.default: _all_indices,
    _aten.equal.default: lambda x: True,
}


def _location() -> str:
    """File, line and function of the innermost caller outside of torch and of this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_torch(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_torch(path: str) -> bool:
    return f"{Path(torch.__file__).parent}" in path or path == __file__
