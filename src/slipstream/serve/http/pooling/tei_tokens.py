"""TEI's token routes: /tokenize for requests with `inputs`, and /decode."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.base.errors import InvalidPrompt
from slipstream.front.served import POOLING_TASKS, ServedModel
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.pooling.fields import size_of
from slipstream.serve.http.pooling.tei_errors import TeiErrorBody, as_tei_error
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import post
from slipstream.text.tokenizer import Tokenizer

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
    served, tokenizer = _tokenizer(request, model)
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

    return json_response(await request.state.off_loop(size_of(texts), tokenise))


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


class DecodeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str | None = None
    ids: Annotated[list[int | list[int]], msgspec.Meta(description="token ids: one list or several")]
    skip_special_tokens: bool = True


async def decode(request: Request, body: DecodeRequest) -> Response:
    served, tokenizer = _tokenizer(request, body.model)
    lists: list[Any] = body.ids if body.ids and isinstance(body.ids[0], list) else [body.ids]
    request.check_count(len(lists), "ids")
    for ids in lists:
        if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
            raise bad_request("ids must be a list of token ids, or a list of such lists", "ids")
        for token in ids:
            if not 0 <= token < served.description.vocab_size:
                raise InvalidPrompt(f"token id {token} is unknown; {served.description.known_ids}")
    size = sum(map(len, lists))

    def decode() -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in lists]

    return json_response(await request.state.off_loop(size, decode))


def _tokenizer(request: Request, model: str | None) -> tuple[ServedModel, Tokenizer]:
    served = request.state.engine.model(model, *POOLING_TASKS)
    if served.tokenizer is None:
        raise bad_request("this server has no tokenizer; start it without --skip-tokenizer-init")
    return served, served.tokenizer


ROUTES = [
    post(
        "/decode", decode, "TEI: token ids to text", DecodeRequest,
        response_model=list[str], convert_error=as_tei_error, error_model=TeiErrorBody, uses_queue=False,
    ),
]  # fmt: skip
