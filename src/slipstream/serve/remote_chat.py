"""RemoteChat: a server somewhere, with the face of an LLM as far as a conversation needs it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from slipstream.base.errors import EngineDead, InvalidOption, UserError

if TYPE_CHECKING:
    from slipstream.front.results import RequestOutput
    from slipstream.params.sampling import SamplingParams


_THINK, _END_THINK = "<think>\n", "\n</think>\n\n"


class _LimitTooLarge(UserError):
    """Prompt and max_tokens do not fit the context together."""


class RemoteChat:
    def __init__(self, url: str, *, model: str | None, api_key: str | None, changes: dict[str, Any]) -> None:
        """`changes`: what was said about sampling; the server's model decides on the rest."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidOption(f"url is {url!r}; give one like http://127.0.0.1:8000")
        self._host, self._port, self._encrypted = parts.hostname, parts.port, parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._body: dict[str, Any] = {"stream": True, **changes}
        if model is not None:
            self._body["model"] = model

    def stream_chat(self, messages: Sequence[dict[str, str]], params: SamplingParams) -> Iterator[RequestOutput]:
        """As `LLM.stream_chat`. Leaving the loop early hangs up, and the server ends the request."""
        from slipstream.front.results import CompletionOutput, RequestOutput

        kind = http.client.HTTPSConnection if self._encrypted else http.client.HTTPConnection
        connection = kind(self._host, self._port)
        answer = CompletionOutput(0, "", [])
        result = RequestOutput("remote", None, [], None, [answer], False)
        body = {**self._body, "messages": messages}
        try:
            try:
                response = self._send(connection, body)
            except _LimitTooLarge:
                body.pop("max_tokens", None)  # then the limit is the rest of the context, as it is for an LLM
                response = self._send(connection, body)
            for event in _events(response):
                for choice in event["choices"]:
                    answer.text += _text(choice["delta"], answer.text)
                    answer.finish_reason = choice["finish_reason"]
                    result.finished = answer.finish_reason is not None
                    yield result
        except (OSError, http.client.HTTPException) as error:
            raise EngineDead(f"the server cannot be reached: {error or type(error).__name__}") from None
        finally:
            connection.close()

    def _send(self, connection: http.client.HTTPConnection, body: dict[str, Any]) -> http.client.HTTPResponse:
        connection.request("POST", self._path, json.dumps(body), self._headers)
        response = connection.getresponse()
        if response.status != 200:
            raise _error(response.status, response.read())
        return response

    def close(self) -> None:
        """Connections end with their answers."""


def _text(delta: dict[str, Any], before: str) -> str:
    """The text of an event after the text `before`. Reasoning, which the server separates, is shown between tags."""
    reasoning, content = delta.get("reasoning") or "", delta.get("content") or ""
    is_open = before.startswith(_THINK) and _END_THINK not in before
    if reasoning and not is_open:
        reasoning = _THINK + reasoning
    if content and (is_open or reasoning):
        content = _END_THINK + content
    return reasoning + content


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
            event = json.loads(line[6:])
            if "error" in event:
                raise EngineDead(event["error"]["message"])
            yield event


def _error(status: int, body: bytes) -> Exception:
    try:
        error = json.loads(body)["error"]
        text = error["message"]
        if error.get("code") == "context_length_exceeded" and error.get("param") == "max_tokens":
            return _LimitTooLarge(f"the server said {status}: {text}")
    except (ValueError, KeyError, TypeError, AttributeError):
        text = body[:200].decode(errors="replace")
    return (UserError if status < 500 else EngineDead)(f"the server said {status}: {text}")
