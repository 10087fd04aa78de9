"""SamplingParams: the sampling parameters of one request.

The constructor and assignments raise for a bad value, so that no step fails on it. The engine takes a copy, so later
assignments change later requests only. Checks of single values are in `values.py`, those that need the model (ids
against the vocabulary) in `front/param_checks.py`, which also replaces -1 by the vocabulary size and tokenises bad
words.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from slipstream.base.errors import InvalidParams
from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.params.values import (
    MAX_COUNT,
    CheckedNames,
    check_bias,
    check_callables,
    check_ids,
    check_integer,
    check_named_values,
    check_names,
    check_real,
    check_strings,
    check_turn,
    plain_value,
)

GREEDY_BELOW = 1e-5  # temperatures under this draw the most likely token
MAX_SEED = 2**64 - 1
MAX_FACTOR = 1e6  # beyond it logits would leave the range of float32
MAX_BAD_WORD = 32  # tokens of one bad word
MAX_BAD_WORDS = 2**15  # tokens of all bad words of a request
MAX_PACKED_LOGPROBS = 32  # likeliest tokens in the array that all rows share; rows with more are in another array

_OPTIONAL = ("max_tokens",)  # None is a value of its own
_SWITCHES = (
    "flat_logprobs",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "detokenize",
)


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
        check_real("temperature", self.temperature, 0.0, MAX_FACTOR)
        check_real("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_integer("top_k", self.top_k, -1, MAX_COUNT)
        check_real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer("seed", self.seed, -(2**63), MAX_SEED)
            if self.seed == -1:
                self._freeze("seed", None)
        for name in ("logprobs", "prompt_logprobs"):
            if isinstance(getattr(self, name), bool):  # OpenAI's switch
                self._freeze(name, 1 if getattr(self, name) else None)
        check_real("repetition_penalty", self.repetition_penalty, 0.0, MAX_FACTOR, open_low=True)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
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
        self._freeze("stop", check_strings("stop", self.stop))
        self._freeze("bad_words", check_strings("bad_words", self.bad_words))
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
            self._freeze("logit_bias", check_bias(self.logit_bias))
        if self.logits_processors is not None:
            self._freeze("logits_processors", check_callables(self.logits_processors))
        if self.extra_args is not None:
            self._freeze("extra_args", check_named_values("extra_args", self.extra_args))
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
        return msgspec.structs.replace(self, **{name: plain_value(value) for name, value in changes.items()})
