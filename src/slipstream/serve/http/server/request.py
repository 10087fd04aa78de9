"""Request: an HTTP request as its handler sees it. Named like Starlette's, over the raw ASGI headers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from slipstream.front.request_state import RequestState
from slipstream.front.served import ServedModel
from slipstream.serve.http.server.access import Access, Headers
from slipstream.serve.http.server.error_formats import errors_of
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.response import Response, StreamingResponse
from slipstream.serve.http.server.state import State

Address = tuple[str, int]
"""The host and port of a client."""


class Request:
    __slots__ = (
        "state", "id", "headers", "path_params", "query_string", "caller", "request_states", "input_field",
        "field_names", "in_batch",
    )  # fmt: skip

    def __init__(
        self,
        state: State,
        id: str,
        headers: Headers,
        path_params: dict[str, str],
        query_string: bytes,
        caller: str,
        *,
        in_batch: bool = False,
    ) -> None:
        self.state = state  # of the server
        self.id = id  # the client's X-Request-Id, or one of ours
        self.headers = headers
        self.path_params = path_params
        self.query_string = query_string
        self.caller = caller  # an API key or a connection, for fair scheduling among callers
        self.in_batch = in_batch  # a line of a batch: it has no headers, and so no API key
        self.request_states: Sequence[RequestState] = ()  # its requests to the engine
        self.input_field: str | None = None  # the field with the prompts: errors about a prompt name it
        self.field_names: dict[str, str] = {
            "lora_request": "model"
        }  # engine parameters that have another name in this request

    def set_input_field(self, field: str) -> None:
        """Errors about prompts name this field."""
        self.input_field = field
        self.field_names["prompt_token_ids"] = field

    def check_count(self, count: int, name: str) -> None:
        """Raises if a field has more entries than the server takes."""
        if count > (limit := self.state.settings.max_inputs):
            fact = f"{name} has {count} entries, this server takes {limit} at once"
            raise bad_request(f"{fact}; send fewer or raise --max-inputs", name, "too_many_inputs")

    def check_samples(self, num_prompts: int, n: int) -> None:
        """Raises if all prompts together have more samples than the server takes."""
        if num_prompts * n > (limit := self.state.settings.max_samples):
            fact = f"{num_prompts} prompts with n={n} make {num_prompts * n} samples, this server takes {limit} at once"
            raise bad_request(f"{fact}; send fewer prompts, lower n or raise --max-samples", "n", "too_many_inputs")

    def header(self, name: bytes) -> str | None:
        for key, value in self.headers:
            if key == name:
                return value.decode("latin-1")
        return None

    def choose_model(self, name: str | None, *tasks: str) -> ServedModel:
        """Returns the model of that name, or the best one for the first of the tasks that any model can do.

        Raises if the model can do none of them; the error lists what each model does.
        """
        models = self.state.engine.models
        served = self.state.engine.model(name, *tasks)
        if any(served.can(task) for task in tasks):
            return served
        wanted = tasks[0] if len(tasks) == 1 else f"any of {', '.join(tasks)}"
        if name:
            fact = f"the model {served.description.name} does {_tasks(served)}, and this route needs {wanted}"
        else:
            fact = f"no model here does {wanted}"
        able = [other for other, each in models.items() if any(each.can(task) for task in tasks)]
        if able:
            hint = f"choose {' or '.join(able)}"
        else:
            hint = "here " + "; ".join(f"{other} does {_tasks(each)}" for other, each in models.items())
        raise bad_request(f"{fact}; {hint}", "model", "model_cannot")


def _tasks(served: ServedModel) -> str:
    return ", ".join(served.tasks)


# Query parameters of routes. No parameter is ignored: an unknown one is refused by name.


def query_of(request: Request, *names: str) -> dict[str, str]:
    """Returns the parameters of the query string. Raises for others than `names`."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(request.query_string.decode("latin-1"), keep_blank_values=True):
        if name not in names:
            hint = f"give {', '.join(names)}" if names else "remove it"
            raise bad_request(f"there is no parameter {name[:100]}; {hint}", name[:100])
        found[name] = value
    return found


def limit_of(query: dict[str, str], most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad_request(f"limit is {text[:20]!r}; give 1 to {most}", "limit")
    return int(text)


def newest_first(query: dict[str, str]) -> bool:
    """The order of a list: desc, the default, or asc."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise bad_request(f"order is {order[:50]!r}; give asc or desc", "order")
    return order == "desc"


# Route: one route of the server. Dispatch, access control and the OpenAPI document are generated from the routes.
#
# A module of routes has a list `ROUTES`; `table.py` lists the modules.

Endpoint = Callable[[Request, Any], Awaitable[Response | StreamingResponse]]
"""Called with the request and the decoded body: None if the route has none, the parts by name of a form."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    method: str
    path: str  # in Starlette's syntax: /v1/models/{model:path}
    endpoint: Endpoint
    summary: str
    body: Any = None  # type of the JSON body
    form: Any = None  # type with the fields of a form (multipart/form-data), which is an upload
    response_model: Any = None  # type of the JSON response, for the OpenAPI document
    access: Access = "user"
    convert_error: Callable[[HTTPException], HTTPException] | None = None  # for an API with its own error format
    error_model: Any = None  # type of such errors, for the OpenAPI document
    any_content_type: bool = False  # the body is JSON whatever its header says, as Ollama's clients send it
    reads_body: bool = True  # of a POST request; False for a route that only refuses
    any_host: bool = False  # do not check the Host header
    quiet: bool = False  # for probes and scrapers: logged at level debug
    needs_engine: bool = True  # watched for disconnects and deadlines, and refused until the engine is ready
    uses_queue: bool = True  # sends requests to the engine: refused while the queue is full


def get(path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
    return Route(
        method="GET",
        path=path,
        endpoint=endpoint,
        summary=summary,
        **(errors_of(path) | {"needs_engine": False, "uses_queue": False} | more),
    )


def delete(path: str, endpoint: Endpoint, summary: str, **more: Any) -> Route:
    how = errors_of(path) | {"needs_engine": False, "uses_queue": False} | more
    return Route(method="DELETE", path=path, endpoint=endpoint, summary=summary, **how)


def post(path: str, endpoint: Endpoint, summary: str, body: Any = None, **more: Any) -> Route:
    return Route(method="POST", path=path, endpoint=endpoint, summary=summary, body=body, **(errors_of(path) | more))


def refused(path: str, hint: str, *, method: str = "POST", **more: Any) -> Route:
    """Returns a route that clients know and that this server does not have: its error says so by name."""

    async def refuse(request: Request, body: None) -> Response:
        raise HTTPException(400, f"{path} is not supported: {hint}", code="unsupported_route", closes=True)

    how = errors_of(path) | {"needs_engine": False, "uses_queue": False, "reads_body": False} | more
    return Route(method=method, path=path, endpoint=refuse, summary=f"Not supported: {hint}", **how)
