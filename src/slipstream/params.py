"""SamplingParams: the sampling parameters of one request.

The constructor and assignments raise for a bad value, so that no step fails on it. The engine takes a copy, so later
assignments change later requests only. Checks that need the model (ids against the vocabulary) are in
`frontend/param_checks.py`, which also replaces -1 by the vocabulary size and tokenises bad words.
"""

from __future__ import annotations

import copy
import difflib
import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.errors import InvalidParams
from slipstream.structured_params import StructuredOutputsParams, as_params

GREEDY_BELOW = 1e-5  # temperatures under this draw the most likely token
MAX_SEED = 2**64 - 1
MAX_COUNT = 2**31 - 1  # of tokens
MAX_FACTOR = 1e6  # beyond it logits would leave the range of float32
MAX_BIAS = 100.0
MAX_BAD_WORD = 32  # tokens of one bad word
MAX_BAD_WORDS = 2**15  # tokens of all bad words of a request
MAX_PACKED_LOGPROBS = 32  # likeliest tokens in the array that all rows share; rows with more are in another array


class CheckedNames(msgspec.StructMeta):
    """Metaclass that reports an unknown parameter by name, with the nearest known one."""

    def __call__(cls, *values: Any, **given: Any) -> Any:
        check_names(cls, given)
        return super().__call__(*map(_plain, values), **{name: _plain(value) for name, value in given.items()})


def check_names(params: Any, given: Iterable[str]) -> None:
    known = params.__struct_fields__
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "there are " + ", ".join(known)
            raise InvalidParams(f"{params.__name__} has no {name}; {hint}")


class RequestOutputKind(enum.IntEnum):
    """The content of each result of a stream."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one result, at the end


class SamplingParams(msgspec.Struct, omit_defaults=True, tag=True, metaclass=CheckedNames):
    """Parameters of sampling and stopping for one request. The order of the fields is vLLM's."""

    n: int = 1
    """Number of samples per prompt. They share the prompt's KV cache pages."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit once per occurrence in the output."""
    repetition_penalty: float = 1.0
    """Over 1 discourages tokens of prompt and output: positive logits are divided by it, negative ones multiplied."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probabilities sum to this; 1 keeps all."""
    top_k: int = 0
    """Keep this many of the most likely tokens; 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens whose probability is at least this fraction of the largest one."""
    seed: int | None = None
    """Seed of the samples. Samples depend on the seed only, not on other requests of the batch."""
    stop: str | Sequence[str] | None = None
    """Strings that stop generation."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that stop generation."""
    ignore_eos: bool = False
    """Continue past the model's end token."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens; None is up to the model length."""
    min_tokens: int = 0
    """Minimum number of tokens before the end token or a stop token is allowed."""
    logprobs: int | None = None
    """Return the logprob of each sampled token and of this many most likely tokens; -1 is the whole vocabulary."""
    prompt_logprobs: int | None = None
    """The same for each prompt token except the first. Such a prompt does not use the prefix cache."""
    logprob_token_ids: Sequence[int] | None = None
    """Return the logprobs of these tokens at every step, besides the sampled token's."""
    flat_logprobs: bool = False
    """vLLM's compact form of logprobs. Here they are always compact, with the attributes of that form."""
    detokenize: bool = True
    """Produce text; False leaves it empty."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    spaces_between_special_tokens: bool = True
    """If special tokens are shown and the tokenizer puts spaces between tokens, put them between special tokens too."""
    include_stop_str_in_output: bool = False
    """Keep the stop string in the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """What each result of a stream has; for `AsyncEngine` and `LLMEngine`. `LLM` returns the whole outputs."""
    structured_outputs: StructuredOutputsParams | None = None
    """The shape of the output: a JSON schema, a regular expression, choices or a grammar."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    allowed_token_ids: Sequence[int] | None = None
    """Sample only these tokens."""
    extra_args: Mapping[str, Any] | None = None
    """Arguments for the logits processors of the engine."""
    bad_words: Sequence[str] | None = None
    """Texts that may not be generated, with or without a leading space; also not as the end of one in the prompt."""
    skip_reading_prefix_cache: bool | None = None
    """Compute the whole prompt, also where the prefix cache has a part of it."""
    thinking_token_budget: int | None = None
    """Maximum number of reasoning tokens: then the end marker is written. None or -1: no limit."""
    logits_processors: Sequence[Any] | None = None
    """Python callables that edit the logits before a token is drawn, for `LLM` and `AsyncEngine`: see
    docs/logits-processors.md."""
    truncate_prompt_tokens: int | None = None
    """Keep only the last tokens of the prompt, this many; -1 keeps as many as fit the model length."""
    priority: int = 0
    """Requests with a lower number run first."""
    cache_salt: str = ""
    """Prompts share cached pages only if they have the same salt."""

    def __post_init__(self) -> None:
        check_integer("n", self.n, 1, 1024)
        _real("temperature", self.temperature, 0.0, MAX_FACTOR)
        _real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1, MAX_COUNT)
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), MAX_SEED)
            if self.seed == -1:
                self._freeze("seed", None)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):  # OpenAI's switch
                self._freeze(name, 1 if getattr(self, name) else None)
        _real("repetition_penalty", self.repetition_penalty, 0.0, MAX_FACTOR, open_low=True)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_COUNT)
        check_integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.thinking_token_budget is not None:
            check_integer("thinking_token_budget", self.thinking_token_budget, -1, MAX_COUNT)
            if self.thinking_token_budget == -1:
                self._freeze("thinking_token_budget", None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(
                f"min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}; lower the first or raise the second",
                param="min_tokens",
            )
        self._freeze("stop", _strings("stop", self.stop))
        self._freeze("bad_words", _strings("bad_words", self.bad_words))
        self._freeze("stop_token_ids", check_ids("stop_token_ids", self.stop_token_ids))
        self._freeze("logprob_token_ids", check_ids("logprob_token_ids", self.logprob_token_ids))
        if self.allowed_token_ids is not None:
            self._freeze("allowed_token_ids", check_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise InvalidParams(
                    "allowed_token_ids is empty, so no token could be drawn; give at least one, or leave it out",
                    param="allowed_token_ids",
                )
        if self.logit_bias is not None:
            self._freeze("logit_bias", _bias(self.logit_bias))
        if self.logits_processors is not None:
            self._freeze("logits_processors", _callables(self.logits_processors))
        if self.extra_args is not None:
            self._freeze("extra_args", _named_values("extra_args", self.extra_args))
        if self.structured_outputs is not None:
            self._freeze("structured_outputs", as_params(self.structured_outputs))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParams(f"{name} is {getattr(self, name)!r}; give True or False", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1, MAX_COUNT)
        if self.stop and not self.detokenize:
            raise InvalidParams(
                f"stop is {list(self.stop)} and detokenize False: without text no string is found; "
                "use stop_token_ids or leave detokenize on",
                param="stop",
            )
        if self.truncate_prompt_tokens is not None:
            check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, MAX_COUNT)
            if self.truncate_prompt_tokens == 0:
                raise InvalidParams(
                    "truncate_prompt_tokens is 0, which leaves no prompt; give 1 or more, or -1",
                    param="truncate_prompt_tokens",
                )
        if self.skip_reading_prefix_cache is not None and not isinstance(self.skip_reading_prefix_cache, bool):
            raise InvalidParams(
                f"skip_reading_prefix_cache is {self.skip_reading_prefix_cache!r}; give True, False or None",
                param="skip_reading_prefix_cache",
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidParams(
                f"output_kind is {self.output_kind!r}; give RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY",
                param="output_kind",
            )
        check_turn(self.priority, self.cache_salt)

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the parameters with the new value. An error leaves them as they were."""
        checked = self.with_changes(**{name: value})
        for each in self.__struct_fields__:
            self._freeze(each, getattr(checked, each))

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """The parameters that are not None, and defaults for the others."""
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None or name in _OPTIONAL}
        )

    def clone(self) -> SamplingParams:
        """A copy that shares nothing that can change."""
        return self.with_changes()

    def snapshot(self) -> SamplingParams:
        """A copy for the engine. Faster than `clone`: values that cannot change are not checked again."""
        changeable = self.logit_bias or self.extra_args
        return self.clone() if changeable else copy.copy(self)

    def _freeze(self, name: str, value: object) -> None:
        msgspec.structs.force_setattr(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return self.stop  # type: ignore[return-value]  # made a tuple when built

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.stop_token_ids  # type: ignore[return-value]

    @property
    def requested_ids(self) -> tuple[int, ...]:
        return self.logprob_token_ids  # type: ignore[return-value]

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling needs the request's earlier tokens."""
        return self.has_penalties or bool(self.bad_words) or self.thinking_token_budget is not None

    @property
    def can_append(self) -> bool:
        """Whether tokens that a grammar forces may be appended without being drawn: nothing but the grammar depends on
        the draw, and no logprob is reported."""
        narrowed = self.allowed_token_ids is not None or self.min_tokens > 0
        return not (narrowed or self.needs_history or self.num_logprobs is not None)

    @property
    def wide_width(self) -> int:
        """Values per token in the array of wide logprobs; 0: the array that all rows share is enough."""
        num = self.num_logprobs or 0
        return max(1 + num if num > MAX_PACKED_LOGPROBS else 0, len(self.requested_ids))

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens to report with each sampled token; None: no logprobs."""
        return 0 if self.logprobs is None and self.requested_ids else self.logprobs

    def with_changes(self, **changes: Any) -> SamplingParams:
        """A copy that differs in these fields, checked again."""
        check_names(SamplingParams, changes)
        return msgspec.structs.replace(self, **{name: _plain(value) for name, value in changes.items()})


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy as those of Python, which can be sent to a core. Does not import numpy."""
    return value.tolist() if type(value).__module__ == "numpy" and hasattr(value, "tolist") else value


def _real(
    name: str, value: object, low: float | None, high: float | None, *, open_low: bool = False, of: str = ""
) -> None:
    """Checks that the value is a finite number in a range. `of`: which value of a parameter, for the message."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidParams(f"{name}{of} is {value!r}; give a number", param=name)
    if not math.isfinite(value):
        raise InvalidParams(f"{name}{of} is {value}; give a finite number", param=name)
    too_low = low is not None and (value <= low if open_low else value < low)
    if too_low or (high is not None and value > high):
        raise InvalidParams(f"{name}{of} is {value}; give {_range(low, high, open_low)}", param=name)


def check_integer(name: str, value: object, low: int | None, high: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidParams(f"{name} is {value!r}; give a whole number", param=name)
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidParams(f"{name} is {value}; give {_range(low, high, False)}", param=name)


def check_turn(priority: object, cache_salt: object) -> None:
    """Checks priority and cache_salt."""
    check_integer("priority", priority, -(2**62), 2**62)
    check_text("cache_salt", cache_salt)


def check_text(name: str, value: object) -> None:
    """Checks that the value is a str that UTF-8 can encode: the core closes connections that send anything else."""
    if not isinstance(value, str):
        raise InvalidParams(f"{name} is {value!r}; give a string", param=name)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParams(
            f"{name} holds half of a surrogate pair, which is no character; give text that is UTF-8", param=name
        ) from None


def _range(low: float | None, high: float | None, open_low: bool) -> str:
    if high is None:
        return f"more than {low}" if open_low else f"at least {low}"
    return f"more than {low} and at most {high}" if open_low else f"{low} to {high}"


_OPTIONAL = ("max_tokens",)  # None is a value of its own
_SWITCHES = ("flat_logprobs", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens",
             "spaces_between_special_tokens", "detokenize")  # fmt: skip


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, list | tuple) or not all(isinstance(text, str) for text in value):
        raise InvalidParams(f"{name} is {value!r}; give a string or a list of strings", param=name)
    if any(not text.strip() if name == "bad_words" else not text for text in value):
        raise InvalidParams(f"{name} holds an empty string, which is in every text; leave it out", param=name)
    return tuple(dict.fromkeys(value))


def check_ids(name: str, value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list | tuple | set | frozenset):
        raise InvalidParams(f"{name} is {value!r}; give a list of token ids", param=name)
    ids = [_plain(each) for each in value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or i < 0:
            raise InvalidParams(f"{name} holds {i!r}; token ids are whole numbers from 0 up", param=name)
    return tuple(dict.fromkeys(ids))


def _named_values(name: str, value: object) -> dict[str, Any] | None:
    if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
        raise InvalidParams(f"{name} is {value!r}; give names with a value each", param=name)
    return dict(value) or None


def _callables(value: object) -> tuple[Any, ...] | None:
    if not isinstance(value, list | tuple) or not all(map(callable, value)):
        raise InvalidParams(
            f"logits_processors is {value!r}; give a list of callables, see docs/logits-processors.md",
            param="logits_processors",
        )
    if needs := [each.needs for each in value if getattr(each, "needs", "logits") not in ("tokens", "logits")]:
        raise InvalidParams(
            f'logits_processors has a callable whose needs is {needs[0]!r}; give "tokens" or "logits"',
            param="logits_processors",
        )
    return tuple(value) or None


def _bias(value: object) -> dict[int, float] | None:
    """Checks logit_bias. Ids may be strings, as in JSON."""
    if not isinstance(value, Mapping):
        raise InvalidParams(f"logit_bias is {value!r}; give an object of token ids and numbers", param="logit_bias")
    bias: dict[int, float] = {}
    for key, number in value.items():
        token, number = int(key) if isinstance(key, str) and key.isdecimal() else _plain(key), _plain(number)
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise InvalidParams(f"logit_bias holds {key!r}; token ids are whole numbers from 0 up", param="logit_bias")
        if token in bias:
            raise InvalidParams(
                f"logit_bias holds {token} twice, as a number and as a text; leave one out", param="logit_bias"
            )
        _real("logit_bias", number, None, None, of=f" of {token}")
        bias[token] = min(MAX_BIAS, max(-MAX_BIAS, float(number)))  # clamped, as in OpenAI's API
    return bias or None
