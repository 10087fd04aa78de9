"""Makes scheduler requests from Submit messages: applies defaults and derives seeds."""

from __future__ import annotations

from slipstream.config.config import EngineConfig
from slipstream.contracts.messages import Submit
from slipstream.contracts.request import Request
from slipstream.params.pooling import PoolingParams
from slipstream.params.sampling import SamplingParams
from slipstream.scheduler.encoder_scheduler import EncoderRequest


def encoder_request(message: Submit) -> EncoderRequest:
    """For an encoder, which computes whole prompts."""
    params = message.params
    assert isinstance(params, PoolingParams) and params.task is not None, "inputs refuse what this model cannot do"
    return EncoderRequest(
        message.request_id,
        message.prompt_token_ids,
        params,
        message.type_start,
        message.num_seen,
        message.caller,
        message.lora,
    )


def requests_of(message: Submit, config: EngineConfig, number: int) -> list[Request]:
    """For a model with a cache: one request per sample. `number`: of the message, in order of submission."""
    if isinstance(message.params, PoolingParams):
        return [_pooling_request(message, message.params)]
    return _samples(message, message.params, config, number)


def _pooling_request(message: Submit, params: PoolingParams) -> Request:
    assert params.task is not None, "inputs name the task"
    assert message.type_start is None is message.num_seen, "only models of whole prompts have types and unseen tokens"
    ids = message.prompt_token_ids
    return Request(
        message.request_id,
        ids,
        params,
        priority=message.priority,
        caller=message.caller,
        cache_salt=message.cache_salt,
        max_length=len(ids) + 1,
        lora=message.lora,
    )


def _samples(message: Submit, params: SamplingParams, config: EngineConfig, number: int) -> list[Request]:
    assert -1 not in (params.logprobs, params.prompt_logprobs), "InputProcessor replaces -1 by the vocabulary size"
    limit = config.scheduler.max_model_len
    length = len(message.prompt_token_ids)
    max_length = limit if params.max_tokens is None else min(limit, length + params.max_tokens)
    seed = _mix(config.scheduler.seed, number) if params.seed is None else params.seed & (2**64 - 1)
    end_ids = () if params.ignore_eos else config.model.info.eos_token_ids
    bad_words = tuple(map(tuple, message.bad_words))
    embeds = None if message.prompt_embeds is None else message.prompt_embeds.array()
    return [
        Request(
            message.request_id,
            message.prompt_token_ids,
            params,
            sample=sample,
            priority=message.priority,
            caller=message.caller,
            cache_salt=message.cache_salt,
            stop_ids=(*end_ids, *params.stop_ids),
            bad_words=bad_words,
            thinking=message.thinking,
            max_length=max_length,
            seed=seed,
            lora=message.lora,
            embeds=embeds,
        )
        for sample in range(params.n)
    ]


def _mix(seed: int, number: int) -> int:
    """A 64-bit seed for a request without one, from the engine's seed and the request's number."""
    x = (seed * 0x9E3779B97F4A7C15 + number * 0xD1B54A32D192ED03 + 0x2545F4914F6CDD1D) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return x ^ (x >> 31)
