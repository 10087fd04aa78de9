"""How many numbers the result of a pooling request has, known before anything runs."""

from __future__ import annotations

from slipstream.config.pooling_info import PoolingInfo
from slipstream.engine.model_description import ModelDescription
from slipstream.errors import RequestTooLarge
from slipstream.messages import Submit
from slipstream.pooling_params import TOKEN_TASKS, PoolingParams


def num_numbers(pooling: PoolingInfo, vocab_size: int, params: PoolingParams, num_tokens: int) -> int:
    """Of one result, at most: a model that scores steps returns fewer lines than the prompt has tokens."""
    if params.query_key:
        return 1  # its vectors stay on the device
    size = {
        "embed": params.dimensions or pooling.embed_size,
        "token_embed": params.dimensions or pooling.token_size,
        "classify": pooling.num_labels,
        "token_classify": len(params.columns) or pooling.num_labels,
        "sparse": vocab_size,
    }[params.task or pooling.tasks[0]]
    return size * num_tokens if params.task in TOKEN_TASKS else size


def num_bytes(facts: ModelDescription, message: Submit) -> int:
    """Of one result as it leaves the core. A request that generates has none: its tokens leave one by one."""
    assert facts.pooling is not None and isinstance(message.params, PoolingParams), f"{message.request_id} generates"
    each = 8 if facts.dtype == "float64" else 4
    return each * num_numbers(facts.pooling, facts.vocab_size, message.params, len(message.prompt_token_ids))


def check_result(facts: ModelDescription, message: Submit, limit: int) -> None:
    """Raises where the result of one prompt would have more bytes than `limit`. Only a line for each token can."""
    if not isinstance(message.params, PoolingParams) or message.params.task not in TOKEN_TASKS:
        return
    if (size := num_bytes(facts, message)) > limit:
        fact = f"the result of a prompt of {len(message.prompt_token_ids)} tokens would have {size} bytes"
        raise RequestTooLarge(
            f"{fact}, and the engine core can send {limit}; send a shorter prompt, or ask for fewer dimensions"
        )
