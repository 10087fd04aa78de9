"""PrefillFirst: has a prompt computed by a prefill server before its request goes to a decode server.

The prefill server gets the same request, limited to one token, and keeps the pages of the prompt. The decode server
asks it for these pages by their hashes (`handoff/client.py`). If a prefill server fails, the decode server computes
the prompt.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Protocol

import msgspec

from slipstream.serve.http.url_replicas import UrlReplica, UrlReplicas

log = logging.getLogger("slipstream.proxy")

PATHS = (b"/v1/completions", b"/v1/chat/completions")
MAX_SECONDS = 300.0
# fields that do not change the prompt, and cost time, conflict with a single token or need another one of these
_DROPPED = (
    "stream", "stream_options", "n", "best_of", "use_beam_search", "length_penalty", "max_tokens",
    "max_completion_tokens", "min_tokens", "logprobs", "top_logprobs", "logprob_token_ids",
    "return_tokens_as_token_ids", "response_format", "structured_outputs", "guided_json", "guided_regex",
    "guided_choice", "guided_grammar", "guided_whitespace_pattern", "stop", "logit_bias", "thinking_token_budget",
)  # fmt: skip


class PassedRequest(Protocol):
    """A request of a client that is passed on."""

    method: bytes

    @property
    def path(self) -> bytes: ...
    def header(self, authority: str, size: int) -> bytes: ...


class PrefillFirst:
    def __init__(self, replicas: UrlReplicas) -> None:
        self.replicas = replicas
        self.num_prefilled = self.num_failed = 0

    async def run(self, request: PassedRequest, body: bytes) -> None:
        """Returns when the prompt is computed, or when it will not be."""
        short = shortened(request.path, body) if request.method == b"POST" else None
        if short is None or (chosen := self.replicas.choose(body, ())) is None:
            return
        replica, hashes = chosen
        replica.begin(hashes, len(body))
        try:
            async with asyncio.timeout(MAX_SECONDS):
                code = await _post(replica, request.header(replica.authority, len(short)) + short)
            self.num_prefilled += code == b"200"
        except (OSError, TimeoutError) as error:
            self.num_failed += 1
            replica.set_ready(False)
            log.warning("prefill server %s was lost, so the prompt is computed again: %s", replica.url, error)
        finally:
            replica.end(len(body))


def shortened(path: bytes, body: bytes) -> bytes | None:
    """The request with the same prompt and one token; None if it has no prompt that another engine can continue."""
    if path not in PATHS:
        return None
    try:
        fields: Any = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return None
    if not isinstance(fields, dict) or fields.get("echo") or fields.get("prompt_logprobs") is not None:
        return None
    kept = {name: value for name, value in fields.items() if name not in _DROPPED}
    return msgspec.json.encode(kept | {"max_tokens": 1})


async def _post(replica: UrlReplica, request: bytes) -> bytes:
    """Sends a request and reads its answer to the end. Returns the status code. Raises OSError."""
    reader, writer = await replica.connect()
    try:
        writer.write(request)
        code = b"".join((await reader.readline()).split(b" ")[1:2])
        while await reader.read(2**16):
            pass
    finally:
        writer.close()
    if not code:
        raise ConnectionError("the connection has ended")
    return code
