"""Ollama's `options`, `format`, `think` and `keep_alive`, as parameters of the engine. No option is ignored."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.serve.http.chat.dialects import chat_params, json_shape
from slipstream.serve.http.errors import bad_request
from slipstream.serve.http.openai.fields import Refused
from slipstream.serve.http.request import Request


def _doc(text: str) -> msgspec.Meta:
    return msgspec.Meta(description=text)


class OllamaFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of /api/chat and /api/generate."""

    model: Annotated[str, _doc("a name from /api/tags, with or without :latest")]
    stream: Annotated[bool | None, _doc("default: true")] = None
    format: Annotated[str | dict[str, Any] | None, _doc("json, or a JSON schema")] = None
    options: Annotated[dict[str, Any] | None, _doc("such as temperature, top_k, num_predict, stop")] = None
    think: Annotated[bool | str | None, _doc("switches reasoning, or sets its effort: low, medium, high")] = None
    keep_alive: Annotated[Any, _doc("models stay loaded; 0, which would unload one, is refused")] = None
    logprobs: Refused = None
    top_logprobs: Refused = None
    truncate: Refused = None
    shift: Refused = None


REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), "use /v1/chat/completions"),
    "top_logprobs": ((0,), "use /v1/chat/completions"),
    "truncate": ((False,), "a prompt that is too long is refused, not truncated"),
    "shift": ((False,), "the context is not shifted; shorten the messages"),
}

_NAMES = {  # of parameters, in `options`
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "seed": "seed", "stop": "stop",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repetition_penalty",
}  # fmt: skip
_AT_START = "it is set when the server starts"
_REFUSED_OPTIONS: dict[str, tuple[tuple[Any, ...], str]] = {
    "typical_p": ((1, 1.0), "use top_p or min_p"),
    "tfs_z": ((1, 1.0), "use top_p or min_p"),
    "mirostat": ((0,), "use temperature and top_p"),
    "mirostat_tau": ((), "use temperature and top_p"),
    "mirostat_eta": ((), "use temperature and top_p"),
    "repeat_last_n": ((-1,), "repeat_penalty counts the whole text"),
    "penalize_newline": ((True,), "repeat_penalty counts all tokens"),
    "num_keep": ((0,), "the context is not shifted"),
    "num_batch": ((), _AT_START), "num_gpu": ((), _AT_START), "main_gpu": ((), _AT_START),
    "num_thread": ((), _AT_START), "numa": ((False,), _AT_START), "use_mmap": ((), _AT_START),
    "use_mlock": ((False,), _AT_START), "low_vram": ((False,), _AT_START), "f16_kv": ((True,), _AT_START),
    "vocab_only": ((False,), _AT_START), "logits_all": ((False,), _AT_START), "embedding_only": ((False,), _AT_START),
}  # fmt: skip


def check_options(options: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the options that are not null. Raises for those that are unknown or not supported."""
    given = {name: value for name, value in (options or {}).items() if value is not None}
    for name, value in given.items():
        if name in _REFUSED_OPTIONS:
            supported, hint = _REFUSED_OPTIONS[name]
            if not any(value is one or (value == one and type(value) is not bool) for one in supported):
                raise bad_request(f"options.{name} is not supported: {hint}", "options", "unsupported_parameter")
        elif name not in _NAMES and name not in ("num_predict", "num_ctx"):
            raise bad_request(f"there is no option {name[:100]}; give {', '.join((*_NAMES, 'num_predict'))}", "options")
    if (wanted := given.get("num_ctx")) is not None and (type(wanted) is not int or wanted < 1):
        raise bad_request(f"options.num_ctx is {wanted!r:.50}; give a number of tokens", "options")
    return given


def num_ctx(options: dict[str, Any] | None, most: int) -> int | None:
    """The limit of tokens that `num_ctx` sets; None if it is no less than `most`, the limit of the model."""
    wanted: int | None = (options or {}).get("num_ctx")
    return None if wanted is None or wanted >= most else wanted


def ollama_params(request: Request, served: ServedModel, body: OllamaFields) -> tuple[SamplingParams, int | None]:
    """Returns the parameters, and num_predict where it is a limit."""
    check_keep_alive(body.keep_alive)
    given = check_options(body.options)
    values = {ours: _checked(name, given[name]) for name, ours in _NAMES.items() if name in given}
    limit = given.get("num_predict")
    if limit is not None and type(limit) is not int:
        raise bad_request(f"options.num_predict is {limit!r:.50}; give a number of tokens", "options")
    limit = None if limit is None or limit < 0 else limit  # -1 and -2: no limit but the context
    if body.format not in (None, ""):
        if body.format != "json" and not isinstance(body.format, dict):
            raise bad_request(f"format is {body.format!r:.50}; give json or a JSON schema", "format")
        values["response_format"] = json_shape(body.format if isinstance(body.format, dict) else None)
    names = {ours: f"options.{name}" for name, ours in _NAMES.items()}
    names |= {"max_tokens": "options.num_predict", "response_format": "format"}
    return chat_params(request, served, values, limit, names), limit


def _checked(name: str, value: Any) -> Any:
    if name == "stop":
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(text, str) for text in listed):
            raise bad_request("options.stop must be a string or a list of strings", "options")
        return listed
    if type(value) not in (int, float):
        raise bad_request(f"options.{name} is {value!r:.50}; give a number", "options")
    return int(value) if name in ("top_k", "seed") and value == int(value) else value


def check_keep_alive(given: Any) -> None:
    """Raises for 0, which would unload the model. Other durations are kept: models stay loaded."""
    text = given.strip() if isinstance(given, str) else given
    is_zero = (type(text) in (int, float) and text == 0) or (isinstance(text, str) and text.rstrip("smh") == "0")
    if is_zero or not (given is None or type(given) in (int, float, str)):
        raise bad_request("keep_alive would unload the model, and models stay loaded; remove it", "keep_alive")


def find_model(request: Request, name: str, *tasks: str) -> ServedModel:
    """The model of that name, which clients extend by :latest."""
    models = request.state.engine.models
    plain = name.removesuffix(":latest")
    return request.choose_model(plain if name not in models and plain in models else name, *tasks)
