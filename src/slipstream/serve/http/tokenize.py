"""POST /tokenize and /detokenize: the token ids that the engine uses for a text. vLLM's format; TEI's with `inputs`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.base.errors import InvalidPrompt
from slipstream.front.served import ServedModel
from slipstream.serve.http.errors import as_http_error, bad_request
from slipstream.serve.http.openai.messages import AllowControlTokens, prompt_chars, text_messages
from slipstream.serve.http.pooling.tei_errors import as_tei_error
from slipstream.serve.http.pooling.tei_tokens import check_chars, tei_tokenize
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post
from slipstream.text.tokenizer import Tokenizer


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A prompt or messages; or `inputs`, for a response in TEI's format."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None  # default: true, and false with continue_final_message
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    allow_control_tokens: AllowControlTokens = None
    inputs: Annotated[str | list[str] | None, msgspec.Meta(description="TEI: one text or a list")] = None
    prompt_name: Annotated[str | None, msgspec.Meta(description="TEI: one of the model's prompts")] = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    tokens: list[int]


class DetokenizeResponse(msgspec.Struct):
    prompt: str


async def tokenize(request: Request, body: TokenizeRequest) -> Response:
    if body.inputs is not None:
        try:
            return await _as_tei(request, body, body.inputs)
        except Exception as error:
            raise as_tei_error(as_http_error(error, request.id, request.field_names)) from error
    if body.prompt_name is not None:
        raise bad_request("prompt_name needs inputs; give inputs, or remove it", "prompt_name")
    served = request.state.engine.model(body.model, *(() if body.messages is None else ("generate",)))
    tokenizer = _tokenizer(served)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt" if body.prompt is None else "messages")
    if body.prompt is not None:
        request.set_input_field("prompt")
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise bad_request(f"{name} needs messages; give messages, or remove it", name)
    else:
        text_messages(request, body.messages or [], tokenizer)
    size = len(body.prompt) if body.prompt is not None else prompt_chars(body.messages, body.chat_template_kwargs)
    check_chars(size, "messages" if body.prompt is None else "prompt")

    def tokenise() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        continues = bool(body.continue_final_message)
        text = served.inputs.render_messages(
            body.messages or [],
            add_generation_prompt=not continues if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=continues,
            chat_template_kwargs=body.chat_template_kwargs,
            allow_control_tokens=body.allow_control_tokens,
        )
        return tokenizer.encode(text, body.add_special_tokens is True)

    tokens = await request.state.off_loop(size, tokenise)
    texts = [tokenizer.text_of(token) for token in tokens] if body.return_token_strs else None
    return json_response(TokenizeResponse(len(tokens), served.max_num_tokens, tokens, texts))


_OF_MESSAGES = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "allow_control_tokens")


async def _as_tei(request: Request, body: TokenizeRequest, inputs: str | list[str]) -> Response:
    for name in ("prompt", "messages", "return_token_strs", *_OF_MESSAGES):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} and inputs are both given; remove one of them", name)
    return await tei_tokenize(request, body.model, inputs, body.add_special_tokens is not False, body.prompt_name)


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    served = request.state.engine.model(body.model)
    tokenizer = _tokenizer(served)
    request.set_input_field("tokens")
    for token in body.tokens:
        if not 0 <= token < served.description.vocab_size:
            raise InvalidPrompt(f"token id {token} is unknown; {served.description.known_ids}")
    text = await request.state.off_loop(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_response(DetokenizeResponse(text))


def _tokenizer(served: ServedModel) -> Tokenizer:
    if served.tokenizer is None:
        raise bad_request("this server has no tokenizer; start it without --skip-tokenizer-init")
    return served.tokenizer


ROUTES = [
    post(
        "/tokenize", tokenize, "Text to token ids", TokenizeRequest, response_model=TokenizeResponse, uses_queue=False
    ),
    post(
        "/detokenize",
        detokenize,
        "Token ids to text",
        DetokenizeRequest,
        response_model=DetokenizeResponse,
        uses_queue=False,
    ),
]
