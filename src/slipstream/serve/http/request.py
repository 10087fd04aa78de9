"""Request: an HTTP request as its handler sees it. Named like Starlette's, over the raw ASGI headers."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.front.request_state import RequestState
from slipstream.front.served import ServedModel
from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.state import State

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
