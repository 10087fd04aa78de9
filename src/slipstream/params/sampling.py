"""SamplingParams: the sampling parameters of one request.

A parameter is a field of the class and a row of PARAMS, from which follow its check, its request field, its flags, its
names elsewhere, whether redacted recordings keep it, and its line in docs/api.md.

The constructor and assignments raise for a bad value, so that no step fails on it. The engine takes a copy, so later
assignments change later requests only. Checks that need the model (ids against the vocabulary) are in
`front/param_checks.py`, which also replaces -1 by the vocabulary size and tokenises bad words.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.params.values import (
    MAX_COUNT,
    PRIORITY,
    Check,
    CheckedNames,
    Integer,
    Real,
    Switch,
    check_bias,
    check_callables,
    check_ids,
    check_integer,
    check_named_values,
    check_names,
    check_strings,
    check_text,
    plain_value,
)

GREEDY_BELOW = 1e-5  # temperatures under this draw the most likely token
MAX_SEED = 2**64 - 1
MAX_FACTOR = 1e6  # beyond it logits would leave the range of float32
MAX_BAD_WORD = 32  # tokens of one bad word
MAX_BAD_WORDS = 2**15  # tokens of all bad words of a request
MAX_PATTERN = 1024  # tokens of a pattern that repetition detection finds
MAX_PACKED_LOGPROBS = 32  # likeliest tokens in the array that all rows share; rows with more are in another array


class RequestOutputKind(enum.IntEnum):
    """The content of each result of a stream."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one result, at the end


class RepetitionDetectionParams(
    msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, metaclass=CheckedNames
):
    """Ends a sample whose last tokens are one pattern, `min_count` times in a row."""

    max_pattern_size: int = 0
    """The longest pattern in tokens; 0: samples do not end for it."""
    min_pattern_size: int = 0
    """The shortest one; 0 is 1."""
    min_count: int = 0
    """At least 2, if there is a longest pattern."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_pattern_size", 0, MAX_PATTERN),
            ("min_pattern_size", 0, self.max_pattern_size),
            ("min_count", 2 if self.max_pattern_size else 0, MAX_COUNT),
        ):
            check_integer(f"repetition_detection.{name}", getattr(self, name), low, high)


class Use(enum.Flag):
    """Uses of a parameter under its own name."""

    FIELD = enum.auto()  # in requests to the server
    FLAG = enum.auto()  # on the command line of generate and chat
    BENCH = enum.auto()  # and of bench
    KEPT = enum.auto()  # in redacted recordings: its value says nothing about the content of a request


FIELD, FLAG, BENCH, KEPT = Use


class Param(NamedTuple):
    """A row of PARAMS."""

    check: Check
    help: str
    use: Use = FIELD
    ollama: str = ""  # its name among the options of Ollama's API; empty: it has none
    config: str = ""  # in generation_config.json
    gguf: str = ""  # in a GGUF file, after general.sampling.


def _allowed_ids(name: str, value: Any) -> Any:
    if not (ids := check_ids(name, value)):
        raise InvalidParams(
            f"{name} is empty, so no token could be drawn; give at least one, or leave it out", param=name
        )
    return ids


def _prompt_limit(name: str, value: Any) -> Any:
    if value == 0 and value is not False:
        raise InvalidParams(f"{name} is 0, which leaves no prompt; give 1 or more, or -1", param=name)
    return Integer(-1)(name, value)


def _structured(name: str, value: Any) -> Any:
    return as_params(value)


def _output_kind(name: str, value: Any) -> Any:
    if not isinstance(value, RequestOutputKind):
        raise InvalidParams(f"{name} is {value!r}; give RequestOutputKind.CUMULATIVE, DELTA or FINAL_ONLY", param=name)
    return value


def _repetition(name: str, value: Any) -> Any:
    if isinstance(value, Mapping):
        known = RepetitionDetectionParams.__struct_fields__
        if unknown := [key for key in value if key not in known]:
            raise InvalidParams(f"{name} has the field {unknown[0]!r:.100}; give {', '.join(known)}", param=name)
        return RepetitionDetectionParams(**value)
    if value is not None and not isinstance(value, RepetitionDetectionParams):
        raise InvalidParams(f"{name} is {value!r:.100}; give RepetitionDetectionParams, or their fields", param=name)
    return value


_DRAW = FIELD | FLAG | BENCH | KEPT
_NOWHERE = Use(0)
# fmt: off
PARAMS: dict[str, Param] = {
    "temperature": Param(
        Real(0.0, MAX_FACTOR), "divides the logits; 0: greedy", _DRAW, "temperature", "temperature", "temp"),
    "top_p": Param(
        Real(0.0, 1.0, open_low=True), "keep the smallest set of tokens whose probabilities sum to this; 1: all",
        _DRAW, "top_p", "top_p", "top_p"),
    "top_k": Param(
        Integer(-1), "keep this many most likely tokens; 0 or -1: all", _DRAW, "top_k", "top_k", "top_k"),
    "min_p": Param(
        Real(0.0, 1.0), "keep tokens with at least this fraction of the largest probability",
        _DRAW, "min_p", "min_p", "min_p"),
    "top_a": Param(
        Real(0.0, 1.0), "keep tokens with at least this fraction of the square of the largest probability", _DRAW),
    "repetition_penalty": Param(
        Real(0.0, MAX_FACTOR, open_low=True), "over 1 discourages tokens of prompt and output: positive logits are "
        "divided by it, negative ones multiplied", _DRAW, "repeat_penalty", "repetition_penalty", "penalty_repeat"),
    "presence_penalty": Param(
        Real(-2.0, 2.0), "subtracted once from the logit of every token in the output", _DRAW, "presence_penalty"),
    "frequency_penalty": Param(
        Real(-2.0, 2.0), "subtracted from a token's logit once per occurrence in the output",
        _DRAW, "frequency_penalty"),
    "max_tokens": Param(
        Integer(1, or_none=True), "maximum generated tokens; None: up to the model length",
        FIELD | FLAG | KEPT, config="max_new_tokens"),
    "min_tokens": Param(
        Integer(0), "minimum generated tokens before the end token or a stop token", FIELD | FLAG | KEPT),
    "thinking_token_budget": Param(
        Integer(-1, unset=-1), "maximum reasoning tokens; then the marker that ends reasoning is written",
        FIELD | FLAG),
    "stop": Param(check_strings, "a string that stops generation, or a list of them", FIELD | FLAG, "stop"),
    "repetition_detection": Param(
        _repetition, "end a sample that repeats a pattern: max_pattern_size, min_pattern_size (in tokens), min_count",
        FIELD | KEPT),
    "ignore_eos": Param(Switch(), "continue past the model's end token", FIELD | FLAG | KEPT),
    "n": Param(Integer(1, 1024), "samples per prompt, which share its pages of the KV cache", FIELD | KEPT),
    "seed": Param(
        Integer(-(2**63), MAX_SEED, unset=-1), "samples depend on it alone, not on other requests of the batch",
        FIELD, "seed"),
    "logprobs": Param(
        Integer(-1, switch=True), "likeliest tokens to report with each sampled token and its logprob; -1: all", KEPT),
    "prompt_logprobs": Param(
        Integer(-1, switch=True), "likeliest tokens to report for each prompt token; no cached prefix is read",
        FIELD | KEPT),
    "logprob_token_ids": Param(check_ids, "tokens whose logprobs are reported at every step too"),
    "stop_token_ids": Param(check_ids, "token ids that stop generation"),
    "allowed_token_ids": Param(_allowed_ids, "sample only these tokens"),
    "logit_bias": Param(check_bias, "added to the logits of these tokens, -100 to 100"),
    "bad_words": Param(
        check_strings, "texts that may not be generated, with or without a leading space; also not as the end of one "
        "in the prompt"),
    "structured_outputs": Param(
        _structured, "the shape of the output: a JSON schema, a regular expression, choices or a grammar", _NOWHERE),
    "skip_special_tokens": Param(Switch(), "omit special tokens from the text"),
    "spaces_between_special_tokens": Param(
        Switch(), "put spaces between special tokens that are shown, if the tokenizer puts them between others"),
    "include_stop_str_in_output": Param(Switch(), "keep the stop string in the text"),
    "truncate_prompt_tokens": Param(
        _prompt_limit, "keep only this many of the prompt's last tokens; -1: as many as fit the model length"),
    "priority": Param(PRIORITY, "lower values are scheduled first"),
    "cache_salt": Param(check_text, "prompts share cached prefixes only with the same salt"),
    "detokenize": Param(Switch(), "produce text", _NOWHERE),
    "flat_logprobs": Param(
        Switch(), "without effect: logprobs always have vLLM's compact form, and its attributes", _NOWHERE),
    "output_kind": Param(
        _output_kind, "what each result of a stream has, for AsyncEngine and LLMEngine; LLM returns whole outputs",
        _NOWHERE),
    "skip_reading_prefix_cache": Param(
        Switch(or_none=True), "compute the whole prompt, also where the prefix cache has a part of it", _NOWHERE),
    "extra_args": Param(check_named_values, "arguments for the logits processors of the engine", _NOWHERE),
    "logits_processors": Param(
        check_callables, "callables that edit the logits before a token is drawn, for LLM and AsyncEngine: see "
        "docs/logits-processors.md", _NOWHERE),
}
# fmt: on


def names_for(use: Use) -> tuple[str, ...]:
    """The parameters with this use, in the order of PARAMS."""
    return tuple(name for name, row in PARAMS.items() if use in row.use)


class SamplingParams(msgspec.Struct, omit_defaults=True, tag=True, metaclass=CheckedNames):
    """Parameters of sampling and stopping for one request. The order of the fields is vLLM's."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    extra_args: Mapping[str, Any] | None = None
    bad_words: Sequence[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    thinking_token_budget: int | None = None
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: Sequence[Any] | None = None
    truncate_prompt_tokens: int | None = None
    priority: int = 0
    cache_salt: str = ""
    top_a: float = 0.0

    def __post_init__(self) -> None:
        for value, (default, name, check) in zip(msgspec.structs.astuple(self), _CHECKED, strict=True):
            if value is not default:
                kept = check(name, value)
                if kept is not value:
                    self._freeze(name, kept)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParams(
                f"min_tokens is {self.min_tokens}, max_tokens {self.max_tokens}; lower the first or raise the second",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise InvalidParams(
                f"stop is {list(self.stop)} and detokenize False: without text no string is found; "
                "use stop_token_ids or leave detokenize on",
                param="stop",
            )

    def __setattr__(self, name: str, value: Any) -> None:
        """Checks the parameters with the new value. An error leaves them as they were."""
        checked = self.with_changes(**{name: value})
        for each in self.__struct_fields__:
            self._freeze(each, getattr(checked, each))

    @staticmethod
    def from_optional(**given: Any) -> SamplingParams:
        """The parameters that are not None, and defaults for the others."""
        return SamplingParams(
            **{name: value for name, value in given.items() if value is not None or name == "max_tokens"}
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
        return msgspec.structs.replace(self, **{name: plain_value(value) for name, value in changes.items()})


def _checked(field: msgspec.structs.FieldInfo) -> tuple[object, str, Check]:
    """A default that needs no check, the name and the check of a field. Lists are kept as tuples."""
    check = PARAMS[field.name].check
    return check(field.name, None) if check in (check_ids, check_strings) else field.default, field.name, check


_CHECKED = tuple(map(_checked, msgspec.structs.fields(SamplingParams)))
assert len(PARAMS) == len(_CHECKED), f"no fields: {PARAMS.keys() - set(SamplingParams.__struct_fields__)}"
