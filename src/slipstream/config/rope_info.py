"""RopeInfo: rotary position embeddings as in config.json, by the rules of transformers 5.

Older configs have `rope_theta` and `rope_scaling`, newer ones `rope_parameters` with both. If a file has both,
`rope_scaling` is used. Gemma 3, 3n and 4, OLMo-3 and ModernBERT have an object per kind of layer, which `rope_scaling`
changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import BadCheckpoint

_DEFAULT_THETA = 10_000.0
# families with a rope per kind of layer: the fields of the bases in older configs, and their defaults
_BY_LAYER = {
    "Gemma3": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3Text": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3n": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma3nText": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma4": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Gemma4Text": (("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0)),
    "Olmo3": (("rope_theta", 500_000.0), ("rope_theta", 500_000.0)),
    "ModernBert": (("global_rope_theta", 160_000.0), ("local_rope_theta", 10_000.0)),
}
# models that see pictures, whose positions have three parts: in a text all three are the same
_THREE_PARTS = ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
_SCALED = ("llama3", "yarn", "longrope")  # kinds that depend on the original training length


class RopeInfo(msgspec.Struct, frozen=True):
    """Rotary position embeddings: the base, and the scaling for long contexts."""

    theta: float = _DEFAULT_THETA
    kind: str = "default"  # default, linear, dynamic, llama3, yarn, longrope ...
    factors: dict[str, Any] = {}  # parameters of the scaling, under their config.json names

    def short_length(self, max_model_len: int) -> int | None:
        """The longest request that uses LongRoPE's short factors, if longer ones use others; None: all requests of an
        engine have the same frequencies."""
        original = self.factors.get("original_max_position_embeddings")
        return original if self.kind == "longrope" and original is not None and original < max_model_len else None


def read_ropes(config: Mapping[str, Any], family: str) -> tuple[RopeInfo, RopeInfo | None]:
    """The rope of full attention, and that of layers with a window, if the family has one of its own for them."""
    scaling = config.get("rope_scaling")
    parameters = config.get("rope_parameters")
    if family in _BY_LAYER:
        return _by_layer(config, family, scaling, parameters or {})
    given = dict(scaling or parameters or {})
    given = dict(given.get("full_attention", given))
    rope = _rope(given, config.get("rope_theta"))
    if family == "Phi3" and rope.kind in ("su", "yarn"):  # names in early releases
        rope = msgspec.structs.replace(rope, kind="longrope")
    if family in _THREE_PARTS and rope.kind == "mrope":
        rope = msgspec.structs.replace(rope, kind="default")
    factors = dict(rope.factors)
    if (share := config.get("partial_rotary_factor")) is not None:
        factors.setdefault("partial_rotary_factor", share)
    if rope.kind in _SCALED and (original := config.get("original_max_position_embeddings")) is not None:
        factors["original_max_position_embeddings"] = original  # overrides the one among the parameters
    return msgspec.structs.replace(rope, factors=factors), None


def _by_layer(
    config: Mapping[str, Any], family: str, scaling: Any, parameters: Mapping[str, Any]
) -> tuple[RopeInfo, RopeInfo]:
    if not set(parameters) <= {"full_attention", "sliding_attention"}:
        raise BadCheckpoint(
            f"config.json: rope_parameters has {sorted(parameters)}; {family} has one each for full_attention and "
            "sliding_attention"
        )
    (full_name, full_theta), (local_name, local_theta) = _BY_LAYER[family]
    full = dict(parameters.get("full_attention") or {"rope_type": "default"})
    local = dict(parameters.get("sliding_attention") or {"rope_type": "default"})
    if scaling is not None:
        full |= scaling
        if family == "ModernBert":
            local |= scaling
    return _rope(full, config.get(full_name), full_theta), _rope(local, config.get(local_name), local_theta)


def _rope(given: dict[str, Any], theta: Any, usual: float = _DEFAULT_THETA) -> RopeInfo:
    """From a rope_parameters or rope_scaling object. `theta`: the base beside it in the config."""
    factors = {name: value for name, value in given.items() if name not in ("rope_theta", "rope_type", "type")}
    kind = given.get("rope_type") or given.get("type") or "default"
    return RopeInfo(float(given.get("rope_theta") or theta or usual), str(kind), factors)
