"""DraftConfig: how tokens are drafted, read from `speculative_config`, which has vLLM's names."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import msgspec

from slipstream.errors import InvalidOption

MAX_DRAFTS = 16
"""Maximum number of drafts per row and step."""
MAX_MATCH = 64
"""Maximum number of tokens that a match compares."""
DRAFTS_PER_STEP = 256
"""Drafts of all rows of one step that every device has memory for."""
DRAFTS_SHARE = 1 / 16
"""Share of a GPU's memory that the logits of more drafts than that may take."""

_MATCH = {"ngram": (2, 4), "suffix": (1, 24)}  # defaults of shortest and longest match
_METHODS = {
    "ngram": "ngram", "ngram_gpu": "ngram", "[ngram]": "ngram", "suffix": "suffix", "draft_model": "draft_model",
    "eagle": "eagle", "eagle3": "eagle3", "dflash": "dflash",
    "mtp": "mtp", "deepseek_mtp": "mtp", "qwen3_next_mtp": "mtp", "qwen3_5_mtp": "mtp", "glm4_moe_mtp": "mtp",
}  # fmt: skip
_WITH_FOLDER = ("draft_model", "eagle", "eagle3", "dflash")
"""Methods that run a model of a folder of its own."""
WITH_MODEL = (*_WITH_FOLDER, "mtp")
"""Methods that run a model."""
_KNOWN = "ngram, ngram_gpu, suffix, draft_model, eagle, eagle3, mtp and dflash"
_DEFAULT_DRAFTS = {"suffix": 8, "dflash": 7}  # of the others: 4
_NOT_BUILT = {
    "dspark": "corrects the drafts of a block one after another",
    "medusa": "has a head for each draft", "mlp_speculator": "has no attention",
    "custom_class": "runs code of the user's", "extract_hidden_states": "drafts nothing",
}  # fmt: skip
"""Methods of vLLM that are not supported, and why."""
_KEYS = (
    "method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min", "model", "draft_tensor_parallel_size",
)  # fmt: skip
_NO_EFFECT = (
    "max_model_len", "enforce_eager", "attention_backend", "moe_backend", "code_revision",
    "disable_padded_drafter_batch", "use_local_argmax_reduction", "suffix_decoding_max_cached_requests",
)  # fmt: skip
"""Fields of vLLM that change nothing here: a drafter has the length, device and kernels of its engine."""


class DraftConfig(msgspec.Struct, frozen=True):
    method: str  # ngram, suffix, draft_model, eagle, eagle3, mtp or dflash
    num_drafts: int  # maximum per row and step
    # of ngram and suffix
    min_match: int = 0  # tokens at the end of a row that must have occurred before
    max_match: int = 0  # tokens that are compared: a longer match is preferred
    drafts_per_match: float | None = None  # maximum drafts per matching token; None: no limit
    model: str | None = None  # folder or hub name of the model that drafts; None: the method needs none
    is_given: bool = True  # False: only the model was given, and its files tell the method

    @property
    def searches(self) -> bool:
        """Whether drafts come from the text of the row: without a match it has none."""
        return self.method in _MATCH


def read_draft_config(given: Mapping[str, Any] | str | None, short: str | None = None) -> DraftConfig | None:
    """The configuration from `speculative_config`, an object or its JSON text; or from `drafts`, its short form METHOD
    or METHOD:NUMBER. None: no drafts."""
    if short is not None:
        if given is not None:
            raise InvalidOption("drafts and speculative_config are both given; give one of them")
        method, _, number = short.partition(":")
        if number and not number.isdecimal():
            raise InvalidOption(f"drafts is {short!r}; give a method, or a method and a number, as ngram:4")
        given = {"method": method} | ({"num_speculative_tokens": int(number)} if number else {})
    if given is None:
        return None
    found = _fields(given)
    method = _method(found)
    num = _number(found, "num_speculative_tokens", _DEFAULT_DRAFTS.get(method, 4), MAX_DRAFTS)
    if method not in _MATCH:
        if match := [name for name in found if name.startswith("prompt_lookup")]:
            raise InvalidOption(f"speculative_config has {match[0]}, which {method} does not use; remove it")
        return DraftConfig(method, num, model=found.get("model"), is_given="method" in found)
    shortest, longest = _MATCH[method]
    least = _number(found, "prompt_lookup_min", 1, MAX_MATCH)
    max_match = _number(found, "prompt_lookup_max", max(longest, least), MAX_MATCH)
    min_match = _number(found, "prompt_lookup_min", min(shortest, max_match), MAX_MATCH)
    if min_match > max_match:
        raise InvalidOption(
            f"prompt_lookup_min is {min_match} and prompt_lookup_max {max_match}; raise the second or lower the first"
        )
    return DraftConfig(method, num, min_match, max_match, 1.0 if method == "suffix" else None)


def check_draft_ranks(given: Mapping[str, Any] | str | None, num_ranks: int) -> None:
    """Checks `draft_tensor_parallel_size`. `num_ranks`: those of the model; a drafter is divided like its model."""
    count = None if given is None else _fields(given).get("draft_tensor_parallel_size")
    if count is not None and (isinstance(count, bool) or count != num_ranks):
        raise InvalidOption(
            f"draft_tensor_parallel_size of speculative_config is {count!r}, and tensor_parallel_size is {num_ranks}; "
            "a drafter runs on all ranks of its model: give the same number, or remove it"
        )


def _fields(given: Mapping[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise InvalidOption(
                f"speculative_config is {given!r}; give a JSON object, as "
                '{"method": "ngram", "num_speculative_tokens": 4}'
            ) from None
    if not isinstance(given, Mapping):
        raise InvalidOption(f"speculative_config is {given!r:.100}; give an object with a method")
    for name in given:
        if name not in _KEYS and name not in _NO_EFFECT:
            near = difflib.get_close_matches(str(name), _KEYS, n=1)
            hint = f"did you mean {near[0]}?" if near else "it takes " + ", ".join(_KEYS)
            raise InvalidOption(f"speculative_config has no field {name!r}; {hint}")
    return {name: value for name, value in given.items() if value is not None and name in _KEYS}


def _method(found: Mapping[str, Any]) -> str:
    method, model = found.get("method"), found.get("model")
    for name, value in (("method", method), ("model", model)):
        if value is not None and not isinstance(value, str):
            raise InvalidOption(f"{name} of speculative_config is {value!r:.100}; give a text")
    if method is None and model is not None:
        method = model if model in ("ngram", "[ngram]") else "draft_model"
    if method is None:
        raise InvalidOption(f"speculative_config has no method; the methods are {_KNOWN}")
    if method in _NOT_BUILT:
        raise InvalidOption(f"drafts by {method} are not supported: it {_NOT_BUILT[method]}; the methods are {_KNOWN}")
    if method not in _METHODS:
        raise InvalidOption(f"there is no method {method!r} for drafts; the methods are {_KNOWN}")
    if _METHODS[method] in _WITH_FOLDER:
        if not isinstance(model, str) or not model:
            raise InvalidOption(f'drafts by {method} need a model; give its folder as "model" of speculative_config')
    elif model is not None and model not in _METHODS:
        raise InvalidOption(f"speculative_config names the model {model!r}, and {method} needs none; remove it")
    return _METHODS[method]


def _number(found: Mapping[str, Any], name: str, default: int, limit: int) -> int:
    value = found.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
        raise InvalidOption(f"{name} of speculative_config is {value!r}; give a whole number from 1 to {limit}")
    return value
