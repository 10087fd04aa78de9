"""Prompts given as token embeddings: `{"prompt_embeds": tensor}`, as a torch tensor or a numpy array.

The core gets them as numpy values. This file never imports torch: tensors are converted by their own methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from slipstream.base.errors import InvalidParams, InvalidPrompt
from slipstream.contracts.messages import PromptEmbeds, Submit
from slipstream.engine.model_description import ModelDescription
from slipstream.params.sampling import SamplingParams

Values = np.ndarray[Any, Any]

_PARAM = "prompt_embeds"
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def has_embeds(prompt: Mapping[str, Any]) -> bool:
    return prompt.get(_PARAM) is not None


def embedded_submit(message: Submit, prompt: Mapping[str, Any], description: ModelDescription) -> Submit:
    """The message with the embeddings of the prompt, and 0 for each of its token ids."""
    assert isinstance(message.params, SamplingParams)
    if not description.embed_size:
        raise InvalidPrompt(
            f"{description.name} takes no prompt_embeds; start the engine with enable_prompt_embeds, or give a text or "
            "token ids",
            param=_PARAM,
        )
    if prompt.get("prompt_token_ids") is not None:
        raise InvalidPrompt("prompt_embeds and prompt_token_ids are both given; remove one", param=_PARAM)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(message.params, name) is not None:
            raise InvalidParams(f"{name} needs the token ids of the prompt, and prompt_embeds has none", param=name)
    values = check_embeds(prompt[_PARAM], description)
    digest = blake2b(message.cache_salt.encode() + b"\0", digest_size=32)
    digest.update(values.data)
    return msgspec.structs.replace(
        message,
        prompt_token_ids=[0] * len(values),
        prompt_embeds=PromptEmbeds.of(values),
        cache_salt=f"{_PARAM} {digest.hexdigest()}",
    )


def check_embeds(given: Any, description: ModelDescription) -> Values:
    """[tokens, hidden size] in the dtype that the core takes. `given` may have a leading dimension of 1."""
    size = description.embed_size
    wanted = f"give a float tensor [tokens, {size}]"
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) == 3 and shape[0] == 1:
        shape, given = shape[1:], given[0]
    if len(shape) != 2 or shape[1] != size:
        found = list(shape) if hasattr(given, "shape") else type(given).__name__
        raise InvalidPrompt(f"prompt_embeds is {found}; {wanted}", param=_PARAM)
    if (name := str(given.dtype).removeprefix("torch.")) not in _DTYPES:
        raise InvalidPrompt(f"prompt_embeds has the dtype {name}; {wanted}", param=_PARAM)
    if "sparse" in str(getattr(given, "layout", "")):
        raise InvalidPrompt(f"prompt_embeds is a sparse tensor; {wanted}", param=_PARAM)
    if not shape[0]:
        raise InvalidPrompt(f"prompt_embeds has no tokens; {wanted} with at least one", param=_PARAM)
    if shape[0] >= (limit := description.max_model_len):
        raise InvalidPrompt(
            f"prompt_embeds has {shape[0]} tokens, {description.name} takes {limit} including at least one generated "
            "token; shorten it",
            param=_PARAM,
        )
    if not isinstance(given, np.ndarray):
        given = given.detach().cpu()
        given = (given.double() if description.dtype == "float64" else given.float()).numpy()
    values = np.ascontiguousarray(given, np.float64 if description.dtype == "float64" else np.float32)
    if not np.isfinite(values).all():
        raise InvalidPrompt("prompt_embeds has NaN or infinite values; remove them", param=_PARAM)
    return values
