"""POST /v1/embeddings: a vector for each text, or for a conversation."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.frontend.pooling.calls import encode
from slipstream.pooling_params import PoolingParams
from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import Refused
from slipstream.serve.http.openai.messages import AllowControlTokens, message_chars, text_messages
from slipstream.serve.http.pooling.fields import Input, PoolUsage, VectorFields, pooling_params, prompts_of
from slipstream.serve.http.pooling.run import Chosen, choose, numbers_of, run, run_text, short_text, usage_of
from slipstream.serve.http.reply import Reply, json_reply
from slipstream.serve.http.routes import post


class EmbeddingRequest(VectorFields, kw_only=True, forbid_unknown_fields=True):
    """Input, or messages, which the model's chat template makes one text of."""

    input: Input | None = None
    messages: list[dict[str, Any]] | None = None
    add_generation_prompt: Annotated[bool | None, msgspec.Meta(description="of messages; default no")] = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: AllowControlTokens = None
    chat_template: Refused = None


class EmbeddingObject(msgspec.Struct):
    object: str
    index: int
    embedding: Annotated[list[float] | str, msgspec.Meta(description="a text where base64 was asked for")]


class EmbeddingResponse(msgspec.Struct):
    object: str
    data: list[EmbeddingObject]
    model: str
    usage: PoolUsage


async def create_embeddings(call: Call, body: EmbeddingRequest) -> Reply:
    chosen = choose(call, body.model, "embed")
    own: dict[str, Any] = {}
    if body.dimensions is not None:
        own["dimensions"] = body.dimensions
    if body.normalize is not None:
        own["normalize"] = body.normalize
    params = pooling_params(call, body, chosen.inputs.pooling, "embed", **own)
    if body.messages is not None:
        given: Any = [await _message_ids(call, body, chosen, body.messages, params)]
    elif body.input is not None:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise bad_request(f"{name} goes with messages; give messages, or leave it out", name)
        call.reads("input")
        given = body.input
    else:
        raise bad_request("there is no input; give a text, or messages", "input")
    if (text := short_text(given)) is not None:
        pooled, num_tokens = await run_text(call, chosen, text, params, body.prompt_name)
        (numbers,) = written([pooled.array()], body.encoding_format)
        data = [EmbeddingObject("embedding", 0, numbers)]
        return json_reply(EmbeddingResponse("list", data, chosen.name, PoolUsage(num_tokens, num_tokens)))
    prompts, size = prompts_of(call, given)
    verb = encode(chosen.inputs, prompts, params, "embed", prompt_name=body.prompt_name)
    found, _ = await run(call, chosen, verb, size)
    data = [
        EmbeddingObject("embedding", index, numbers)
        for index, numbers in enumerate(written(numbers_of(found), body.encoding_format))
    ]
    return json_reply(EmbeddingResponse("list", data, chosen.name, usage_of(found)))


_OF_MESSAGES = (
    "add_generation_prompt", "continue_final_message", "chat_template_kwargs", "chat_template", "allow_control_tokens",
)  # fmt: skip


async def _message_ids(
    call: Call, body: EmbeddingRequest, chosen: Chosen, messages: list[dict[str, Any]], params: PoolingParams
) -> list[int]:
    """Of a conversation. The template has put special tokens where it wants them; text has them added otherwise."""
    if body.input is not None:
        raise bad_request("there are input and messages; give one of them", "input")
    if body.chat_template is not None:
        raise bad_request("a request brings no template; the server's --chat-template sets one", "chat_template")
    if body.prompt_name is not None:
        raise bad_request("prompt_name is for texts; say it in the messages", "prompt_name")
    inputs, tokenizer = chosen.served.inputs, chosen.served.tokenizer
    checked = text_messages(call, messages, tokenizer)

    def work() -> list[int]:
        text = inputs.render_messages(
            checked,
            add_generation_prompt=bool(body.add_generation_prompt),
            continue_final_message=bool(body.continue_final_message),
            chat_template_kwargs=body.chat_template_kwargs,
            allow_control_tokens=body.allow_control_tokens,
        )
        assert tokenizer is not None  # or there would have been no text
        return tokenizer.encode(chosen.inputs.text_to_read(text, params), add_special_tokens=False)

    return await call.state.off_loop(message_chars(messages), work)


def written(arrays: list[Any], encoding: str | None) -> list[Any]:
    """Numbers as JSON has them: lists, or the bytes of little-endian 32-bit numbers, which msgspec writes as base64."""
    if encoding == "base64":
        return [np.ascontiguousarray(array, "<f4").data.cast("B") for array in arrays]
    return [array.tolist() for array in arrays]


ROUTES = [
    post("/v1/embeddings", create_embeddings, "A vector for each text", EmbeddingRequest, answer=EmbeddingResponse),
]
