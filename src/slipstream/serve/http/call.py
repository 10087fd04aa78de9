"""Call: one HTTP request under way, as its handler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import bad_request

if TYPE_CHECKING:
    from slipstream.frontend.request_state import RequestState
    from slipstream.serve.http.state import State


Address = tuple[str, int]
"""Of a client: host and port."""


class Call:
    __slots__ = ("state", "id", "headers", "path_params", "query", "caller", "request_states", "input", "names")

    def __init__(
        self, state: State, id: str, headers: Headers, path_params: dict[str, str], query: bytes, caller: str
    ) -> None:
        self.state = state
        self.id = id  # X-Request-Id: the caller's own, or one of ours
        self.headers = headers
        self.path_params = path_params
        self.query = query
        self.caller = caller  # whose requests take turns with those of others: a key or a connection
        self.request_states: Sequence[RequestState] = ()  # what it asked of the engine
        self.input: str | None = None  # the field that holds what is to be read: errors about it name it
        self.names: dict[str, str] = {}  # parameters of the engine that this request calls otherwise

    def reads(self, field: str) -> None:
        """What is to be read is in this field."""
        self.input = field
        self.names["prompt_token_ids"] = field

    def check_count(self, count: int, name: str) -> None:
        """Of what a request brings many of."""
        if count > (limit := self.state.settings.max_inputs):
            fact = f"{name} has {count} entries, this server takes {limit} at once"
            raise bad_request(f"{fact}; send fewer or raise --max-inputs", name, "too_many_inputs")

    def check_samples(self, num_prompts: int, n: int) -> None:
        """Of all prompts of a request together."""
        if num_prompts * n > (limit := self.state.settings.max_samples):
            fact = f"{num_prompts} prompts with n={n} make {num_prompts * n} samples, this server takes {limit} at once"
            raise bad_request(f"{fact}; send fewer prompts, lower n or raise --max-samples", "n", "too_many_inputs")

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None
