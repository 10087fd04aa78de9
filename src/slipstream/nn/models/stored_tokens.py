"""The width of token vectors of late interaction, as the folder's weights have it.

ColBERT's artifact.metadata may be missing or lack `dim`, and BGE-M3 has no setting for its colbert_linear.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.checkpoint.model_info import ModelInfo
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.nn.models.load import BY_TOKEN
from slipstream.nn.models.registry import find_rules, find_shape
from slipstream.nn.models.stored_head import find_named
from slipstream.nn.weights.rules import Rules
from slipstream.nn.weights.safetensors import open_file, open_folder

_WEIGHT = "heads.token.weight"


def with_stored_width(pooling: PoolingInfo, info: ModelInfo, folder: Path) -> PoolingInfo:
    """`token_size` corrected by the weight that makes token vectors, if the folder has one."""
    if not pooling.late or not folder.is_dir() or info.backend_folder:
        return pooling
    if (beside := open_file(folder / BY_TOKEN)) is not None:
        found = find_named(beside, Rules({"{kind}": "heads.token.{kind}"}), (_WEIGHT,))
    elif info.architecture == "HF_ColBERT":
        found = find_named(open_folder(folder), find_rules(info, find_shape(info)), (_WEIGHT,))
    else:
        return pooling
    if (weight := found.get(_WEIGHT)) is None:
        return pooling  # loading says so
    return msgspec.structs.replace(pooling, token_size=weight.shape[0])
