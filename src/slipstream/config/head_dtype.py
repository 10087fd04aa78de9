"""The dtype of a model's head, which vLLM's `hf_overrides={"head_dtype": ...}` names."""

from __future__ import annotations

from slipstream.config.model_info import ModelInfo
from slipstream.config.pooling_info import PoolingInfo
from slipstream.errors import InvalidOption

_NAMES = {"half": "float16", "float": "float32", "double": "float64"}


def check_head_dtype(info: ModelInfo, pooling: PoolingInfo, dtype: str) -> None:
    """Raises InvalidOption if the config asks for another dtype than the head has: the model's `dtype` for the
    projection to tokens, at least float32 for what follows a pooling."""
    asked = info.extra.get("head_dtype")
    if asked is None:
        return
    of_tokens = pooling.generates and not pooling.num_labels
    found = dtype if of_tokens or dtype == "float64" else "float32"
    if (dtype if asked == "model" else _NAMES.get(asked, asked)) != found:
        why = (
            "projections to tokens have the model's dtype"
            if of_tokens
            else "what follows a pooling is at least float32"
        )
        raise InvalidOption(f"hf_overrides: head_dtype is {asked!r:.50}, and the head is computed in {found}: {why}")
