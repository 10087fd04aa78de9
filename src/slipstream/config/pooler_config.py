"""PoolerConfig: vLLM's settings of pooling, as options of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import InvalidOption


class PoolerConfig(msgspec.Struct):
    """`LLM(pooler_config=PoolerConfig(pooling_type="MEAN"))`. The fields are vLLM's; None is the model's setting."""

    task: str | None = None
    pooling_type: str | None = None
    seq_pooling_type: str | None = None
    tok_pooling_type: str | None = None
    use_activation: bool | None = None
    dimensions: int | None = None
    enable_chunked_processing: bool = False
    max_embed_len: int | None = None
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def options(self) -> dict[str, Any]:
        """The options with the same meaning. Raises for a field that none has."""
        for name, hint in _REFUSED.items():
            if getattr(self, name) not in (None, False):
                raise InvalidOption(f"PoolerConfig.{name} is not supported: {hint}")
        kinds = {self.pooling_type, self.seq_pooling_type, self.tok_pooling_type} - {None}
        if len(kinds) > 1:
            raise InvalidOption(f"PoolerConfig has several pooling types, {sorted(map(str, kinds))}; give one")
        found = {"task": self.task, "use_activation": self.use_activation}
        found["pooling_type"] = str(kinds.pop()).lower() if kinds else None
        return {name: value for name, value in found.items() if value is not None}


_BY_REQUEST = "give it in PoolingParams"
_REFUSED = {
    "dimensions": _BY_REQUEST,
    "step_tag_id": _BY_REQUEST,
    "returned_token_ids": _BY_REQUEST,
    "enable_chunked_processing": "a text beyond the model's length is truncated or refused",
    "max_embed_len": "use max_model_len, or truncate_prompt_tokens in PoolingParams",
    "logit_mean": "scores are those of the model",
    "logit_sigma": "scores are those of the model",
}


def as_pooler_config(given: object) -> PoolerConfig:
    """From an object of this class, or from its fields. Raises for an unknown field."""
    if isinstance(given, PoolerConfig):
        return given
    if not isinstance(given, Mapping):
        raise InvalidOption(f"pooler_config is {type(given).__name__}; give a PoolerConfig or its fields")
    if unknown := [name for name in given if name not in PoolerConfig.__struct_fields__]:
        raise InvalidOption(f"PoolerConfig has no {unknown[0]}; it has {', '.join(PoolerConfig.__struct_fields__)}")
    return PoolerConfig(**given)
