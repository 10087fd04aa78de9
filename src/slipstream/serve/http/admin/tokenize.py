"""POST /tokenize and /detokenize: the token ids that the engine uses for a text. vLLM's format; TEI's with `inputs`."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.base.errors import InvalidPrompt
from slipstream.base.typed import Fields, doc
from slipstream.front.served import POOLING_TASKS, ServedModel
from slipstream.serve.http.generation.conversation import (
    OF_MESSAGES,
    AllowControlTokens,
    prompt_chars,
    read_messages,
    render_fields,
)
from slipstream.serve.http.pooling.run import size_of
from slipstream.serve.http.server.error_formats import TeiErrorBody, as_tei_error
from slipstream.serve.http.server.errors import as_http_error, bad_request, check_needed
from slipstream.serve.http.server.request import Request, get, post
from slipstream.serve.http.server.response import JsonList, Response, json_response, large_response
from slipstream.text.tokenizer import Tokenizer


class TokenizeRequest(Fields, kw_only=True):
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
    inputs: Annotated[str | list[str] | None, doc("TEI: one text or a list")] = None
    prompt_name: Annotated[str | None, doc("TEI: one of the model's prompts")] = None


class TokenizeResponse(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Fields, kw_only=True):
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
    check_needed(body, ["prompt_name"], "inputs")
    served = request.state.engine.model(body.model, *(() if body.messages is None else ("generate",)))
    tokenizer = _tokenizer(served)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give either prompt or messages", "prompt" if body.prompt is None else "messages")
    messages: list[dict[str, Any]] = []
    if body.prompt is not None:
        request.set_input_field("prompt")
        check_needed(body, OF_MESSAGES, "messages")
    else:
        messages = read_messages(request, body.messages or [], tokenizer)
    size = len(body.prompt) if body.prompt is not None else prompt_chars(messages, body.chat_template_kwargs)
    check_chars(size, "messages" if body.prompt is None else "prompt")

    def tokenise() -> list[int]:
        if body.prompt is not None:
            return tokenizer.encode(body.prompt, body.add_special_tokens is not False)
        text = served.inputs.render_messages(messages, **render_fields(body, generates=True))
        return tokenizer.encode(text, body.add_special_tokens is True)

    tokens = await request.state.off_loop(size, tokenise)
    shown: Any = JsonList(tokens, _EACH)
    texts: Any = JsonList(map(tokenizer.text_of, tokens), _EACH) if body.return_token_strs else None
    answer = TokenizeResponse(len(tokens), served.max_num_tokens, shown, texts)
    return await large_response(request.state.pieces, answer)


_EACH = 512  # tokens that are encoded at once


async def _as_tei(request: Request, body: TokenizeRequest, inputs: str | list[str]) -> Response:
    for name in ("prompt", "messages", "return_token_strs", *OF_MESSAGES):
        if getattr(body, name) is not None:
            raise bad_request(f"{name} and inputs are both given; remove one of them", name)
    return await tei_tokenize(request, body.model, inputs, body.add_special_tokens is not False, body.prompt_name)


async def detokenize(request: Request, body: DetokenizeRequest) -> Response:
    served = request.state.engine.model(body.model)
    tokenizer = _tokenizer(served)
    request.set_input_field("tokens")
    _check_ids(body.tokens, served)
    text = await request.state.off_loop(
        len(body.tokens), lambda: tokenizer.decode(body.tokens, skip_special_tokens=False)
    )
    return json_response(DetokenizeResponse(text))


def _check_ids(ids: list[int], served: ServedModel) -> None:
    for token in (min(ids), max(ids)) if ids else ():
        if not 0 <= token < served.description.vocab_size:
            raise InvalidPrompt(f"token id {token} is unknown; {served.description.known_ids}")


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


# GET /v1/models: the served models, the default first, then adapters.


class ModelCard(msgspec.Struct):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int
    tasks: list[str]  # generate, and pooling tasks
    root: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its folder
    parent: str | msgspec.UnsetType = msgspec.UNSET  # of an adapter: its base model


class ModelList(msgspec.Struct):
    object: str
    data: list[ModelCard]


async def list_models(request: Request, body: None) -> Response:
    return json_response(ModelList("list", [_card(request, name) for name in _names(request)]))


async def show_model(request: Request, body: None) -> Response:
    request.state.check_ready()
    return json_response(_card(request, request.path_params["model"]))


def _card(request: Request, name: str) -> ModelCard:
    served = request.state.engine.model(name)
    card = ModelCard(name, "model", request.state.started, "slipstream", served.max_num_tokens, served.tasks)
    if served.lora is not None:
        card.root, card.parent = served.lora.lora_path, served.base
    return card


def _names(request: Request) -> list[str]:
    engine = request.state.engine
    return [*engine.models, *engine.adapter_names.of(engine.models)]


MODEL_ROUTES = [
    get("/v1/models", list_models, "The models served here", response_model=ModelList),
    get("/v1/models/{model:path}", show_model, "One model", response_model=ModelCard),
]


# TEI's token routes: /tokenize for requests with `inputs`, and /decode.

MAX_CHARS = 2**21  # characters of one request to a token route


class SimpleToken(msgspec.Struct):
    id: int
    text: str
    special: bool
    start: int | None = None  # offset in the text, in characters; null for a special token
    stop: int | None = None


async def tei_tokenize(
    request: Request, model: str | None, inputs: str | list[str], special: bool, prompt_name: str | None
) -> Response:
    """Returns the tokens of each text, with their offsets."""
    served, tokenizer = _tei_tokenizer(request, model)
    texts = [inputs] if isinstance(inputs, str) else inputs
    request.check_count(len(texts), "inputs")
    if not texts:
        raise bad_request("inputs is empty; give a text", "inputs", "empty")
    check_chars(size_of(texts), "inputs")
    if served.pooling_inputs is not None:
        before = served.pooling_inputs.prefix(prompt_name)
        texts = [before + text for text in texts]
    elif prompt_name is not None:
        raise bad_request(f"{served.description.name} has no named prompts; remove prompt_name", "prompt_name")

    def tokenise() -> list[list[SimpleToken]]:
        tokenizer.encodings(texts, add_special_tokens=special)  # raises for a text that cannot be encoded
        found = tokenizer.backend.encode_batch(texts, add_special_tokens=special)
        return [_tokens(text, encoding) for text, encoding in zip(texts, found, strict=True)]

    found = await request.state.off_loop(size_of(texts), tokenise)
    return await large_response(request.state.pieces, JsonList(JsonList(each, _EACH) for each in found))


def check_chars(size: int, name: str) -> None:
    """Raises for very long texts: a token route has no limit in tokens at which tokenising could stop."""
    if size > MAX_CHARS:
        fact = f"{name} has {size} characters, the limit is {MAX_CHARS}"
        raise bad_request(f"{fact}; send it in parts", name, "too_many_characters")


def _tokens(text: str, encoding: Any) -> list[SimpleToken]:
    tokens = []
    parts = zip(encoding.ids, encoding.tokens, encoding.special_tokens_mask, encoding.offsets, strict=True)
    for token, piece, is_special, (start, stop) in parts:
        if is_special:
            tokens.append(SimpleToken(token, piece, True))
        else:
            tokens.append(SimpleToken(token, text[start:stop], False, start, stop))
    return tokens


class DecodeRequest(Fields, kw_only=True):
    model: str | None = None
    ids: Annotated[list[int | list[int]], doc("token ids: one list or several")]
    skip_special_tokens: bool = True


async def decode(request: Request, body: DecodeRequest) -> Response:
    served, tokenizer = _tei_tokenizer(request, body.model)
    lists: list[Any] = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    request.check_count(len(lists), "ids")
    for ids in lists:
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise bad_request("ids must be a list of token ids, or a list of such lists", "ids")
        _check_ids(ids, served)
    size = sum(map(len, lists))

    def decode() -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]

    return json_response(await request.state.off_loop(size, decode))


def _tei_tokenizer(request: Request, model: str | None) -> tuple[ServedModel, Tokenizer]:
    served = request.state.engine.model(model, *POOLING_TASKS)
    if served.tokenizer is None:
        raise bad_request("this server has no tokenizer; start it without --skip-tokenizer-init")
    return served, served.tokenizer


TEI_TOKEN_ROUTES = [
    post(
        "/decode", decode, "TEI: token ids to text", DecodeRequest,
        response_model=list[str], convert_error=as_tei_error, error_model=TeiErrorBody, uses_queue=False,
    ),
]  # fmt: skip
