"""The lines of OpenAI batch files: requests in the input, results in the output."""

from __future__ import annotations

from codecs import BOM_UTF8
from typing import NamedTuple

import msgspec

from slipstream.params.values import MAX_DEPTH, is_deep_json

ENDPOINTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/rerank", "/v2/rerank", "/rerank",
    "/v1/score", "/score", "/classify", "/pooling",
)  # fmt: skip
"""Routes that a line may name in `url`."""

_MAX_ID_CHARS = 512


class BatchLine(NamedTuple):
    custom_id: str
    url: str
    body: bytes


class BatchLineError(msgspec.Struct):
    """An entry of OpenAI's `errors.data`: why the lines of a file cannot be run."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class InvalidLine(Exception):
    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param

    def at(self, line: int) -> BatchLineError:
        return BatchLineError(self.code, str(self), self.param, line)


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Stream(msgspec.Struct):
    stream: bool | None = None


_decoder = msgspec.json.Decoder(_Request)


def read_line(text: bytes, endpoint: str | None = None) -> BatchLine:
    """Raises InvalidLine. `endpoint`: the url that all lines of a batch must have."""
    if is_deep_json(text):
        raise InvalidLine("invalid_json_line", f"the line is nested too deeply; the limit is {MAX_DEPTH} levels")
    try:
        given = _decoder.decode(text.removeprefix(BOM_UTF8))
        body = bytes(given.body)
        stream = msgspec.json.decode(body, type=_Stream).stream
    except msgspec.ValidationError as error:
        raise InvalidLine("invalid_line", f"{error}; give custom_id, method, url and body") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidLine("invalid_json_line", f"the line is not JSON: {error}") from None
    if not 0 < len(given.custom_id) <= _MAX_ID_CHARS:
        fact = f"custom_id has {len(given.custom_id)} characters"
        raise InvalidLine("invalid_custom_id", f"{fact}; give 1 to {_MAX_ID_CHARS}", "custom_id")
    if given.method != "POST":
        raise InvalidLine("invalid_method", f"method is {given.method!r:.50}; give POST", "method")
    if given.url not in ENDPOINTS:
        raise InvalidLine("invalid_url", f"url is {given.url!r:.100}; give one of {', '.join(ENDPOINTS)}", "url")
    if endpoint is not None and given.url != endpoint:
        raise InvalidLine("mismatched_url", f"url is {given.url}, the batch has the endpoint {endpoint}", "url")
    if stream:
        raise InvalidLine("stream_not_supported", "body.stream is true; a batch has no streams, remove it", "stream")
    return BatchLine(given.custom_id, given.url, body)


class LineResponse(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """The reason why a line has no response, such as `batch_expired`."""

    code: str
    message: str


class LineResult(msgspec.Struct):
    id: str
    custom_id: str
    response: LineResponse | None = None
    error: LineError | None = None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    def encode(self) -> bytes:
        return msgspec.json.encode(self)
