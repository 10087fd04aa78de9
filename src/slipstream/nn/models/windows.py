"""Which layers of a model see a window only, and how wide it is."""

from __future__ import annotations

from collections.abc import Callable

from slipstream.base.errors import BadCheckpoint
from slipstream.checkpoint.model_info import ModelInfo

LOCAL, FULL = "sliding_attention", "full_attention"


def layer_windows(info: ModelInfo, is_local: Callable[[int], bool]) -> tuple[int, ...]:
    """The window of each layer, 0: none. Newer checkpoints list `layer_types`; for the others `is_local` decides."""
    kinds = info.extra.get("layer_types")
    if kinds is None:
        kinds = [LOCAL if is_local(layer) else FULL for layer in range(info.num_layers)]
    if not isinstance(kinds, list) or len(kinds) != info.num_layers or not {*kinds} <= {LOCAL, FULL}:
        raise BadCheckpoint(
            f"layer_types of config.json is {kinds!r}; "
            f"it must say {LOCAL} or {FULL} for each of {info.num_layers} layers"
        )
    if LOCAL not in kinds:
        return (0,) * info.num_layers
    window = info.extra.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise BadCheckpoint(f"sliding_window of config.json is {window!r}; it must be a whole number from 1 up")
    return tuple(window if kind == LOCAL else 0 for kind in kinds)
