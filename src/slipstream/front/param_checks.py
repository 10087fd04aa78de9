"""ParamChecks: checks SamplingParams against a model, and resolves what depends on its vocabulary and tokenizer.

`SamplingParams` itself has checked the ranges; here are the limits of the model, the queue and the memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import numpy as np

from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt
from slipstream.contracts.messages import PromptEmbeds, Submit
from slipstream.engine.model_description import ModelDescription
from slipstream.params.sampling import MAX_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from slipstream.text.tokenizer import Tokenizer

MAX_ANSWER_LOGPROBS = 2**24  # logprobs in one answer
_UNCHECKED_LOGPROBS = 100  # up to this many per token, the total is not checked
_BYTES_EACH = 250  # approximate size of one logprob in the answer: key, number, rank and text


class ParamChecks:
    def __init__(self, description: ModelDescription, tokenizer: Tokenizer | None) -> None:
        self.description = description
        self.tokenizer = tokenizer
        self.structured_config: StructuredOutputsConfig | None = None  # defaults, by FrontEndArgs
        self.max_logprobs: int | None = None  # limit of a request, by FrontEndArgs
        self._resolved: tuple[SamplingParams | None, SamplingParams] | None = None  # the last ones: given, resolved

    def defaults(self) -> SamplingParams:
        """The parameters of the model's generation_config.json, and our own defaults for the others."""
        return SamplingParams(**self.description.defaults.params)

    def resolve(self, given: SamplingParams | None) -> SamplingParams:
        """Returns a copy of the parameters, checked against the model, with the vocabulary size for -1. The last result
        is cached, since the prompts of a call usually share one object."""
        last = self._resolved
        if last is None or last[0] != given:
            own = params = self.defaults() if given is None else _snapshot(given)
            self._check(params)
            if self.structured_config is not None:
                params = self.structured_config.with_defaults(params)
            unlimited = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
            if unlimited:
                params = params.with_changes(**dict.fromkeys(unlimited, self.description.vocab_size))
            self._resolved = last = None if given is None else own, params
        return last[1]

    def _check(self, params: SamplingParams) -> None:
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            # only the largest needs a check: SamplingParams has checked that none is negative
            if (ids := getattr(params, name)) and (token := max(ids)) >= self.description.vocab_size:
                raise InvalidParams(f"{name} has {token}; {self.description.known_ids}", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            asked = self.description.vocab_size if getattr(params, name) == -1 else getattr(params, name) or 0
            if self.max_logprobs is not None and asked > self.max_logprobs:
                raise InvalidParams(
                    f"{name} is {getattr(params, name)}, the limit is {self.max_logprobs}; lower it, or raise "
                    "max_logprobs of the engine",
                    param=name,
                )
            if (getattr(params, name) or 0) > self.description.vocab_size:
                raise InvalidParams(
                    f"{name} is {getattr(params, name)}; the vocabulary has {self.description.vocab_size} tokens, "
                    "lower it, "
                    "or use -1 for the whole vocabulary",
                    param=name,
                )
        if params.min_tokens >= (limit := self.description.max_model_len):
            raise InvalidParams(
                f"min_tokens is {params.min_tokens}, the model length {limit}; lower it", param="min_tokens"
            )
        if (room := self.description.max_waiting) is not None and params.n > room:
            raise InvalidParams(
                f"n is {params.n}, and the queue holds {room} samples; lower n or raise max_waiting", param="n"
            )
        if params.stop_strings and self.tokenizer is None:
            raise InvalidParams(
                "stop strings need a tokenizer, and `skip_tokenizer_init=True` is set; use stop_token_ids", param="stop"
            )
        if params.structured_outputs is not None and self.tokenizer is None:
            raise InvalidParams(
                "structured_outputs need a tokenizer, and `skip_tokenizer_init=True` is set; unset it",
                param="structured_outputs",
            )
        if params.bad_words and self.tokenizer is None:
            raise InvalidParams(
                "bad_words need a tokenizer, and `skip_tokenizer_init=True` is set; use logit_bias to exclude tokens",
                param="bad_words",
            )

    def check_num_logprobs(self, params: SamplingParams, num_prompt: int) -> None:
        """Raises if the logprobs of one answer would fill the memory, before anything runs."""
        each = (params.logprobs or 0) + len(params.requested_ids)
        num_new = self.description.max_model_len - num_prompt
        if params.max_tokens is not None:
            num_new = min(num_new, params.max_tokens)
        of_prompt = params.prompt_logprobs or 0
        total = params.n * num_new * each if each > _UNCHECKED_LOGPROBS else 0
        total += num_prompt * of_prompt if of_prompt > _UNCHECKED_LOGPROBS else 0
        if total > MAX_ANSWER_LOGPROBS:
            raise InvalidParams(
                f"the answer could have {total:,} logprobs, about {total * _BYTES_EACH / 2**30:.1f} GiB: {each} for "
                f"each of up to {params.n * num_new} new tokens, {of_prompt} for each of {num_prompt} prompt tokens; "
                f"the limit is {MAX_ANSWER_LOGPROBS:,}; lower logprobs, prompt_logprobs, max_tokens or n",
                param="logprobs" if each > _UNCHECKED_LOGPROBS else "prompt_logprobs",
            )

    def bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Returns the token ids of each word, in both spellings: at the start of a text, and after a space."""
        if not params.bad_words:
            return []
        assert self.tokenizer is not None
        bare = [word.lstrip() for word in params.bad_words]
        plain = self.tokenizer.encode_batch(bare, add_special_tokens=False)
        spaced = self.tokenizer.encode_batch([" " + word for word in bare], add_special_tokens=False)
        found: dict[tuple[int, ...], None] = {}
        for alone, after_space in zip(plain, spaced, strict=True):
            found[tuple(alone)] = None
            # where the space is a token of its own, the word without it is already listed
            if after_space[-len(alone) :] != alone:
                found[tuple(after_space)] = None
        words = [list(word) for word in found if word]
        for word in words:
            if max(word) >= self.description.vocab_size:
                raise InvalidParams(
                    f"bad_words has token id {max(word)}; {self.description.known_ids}, remove it", param="bad_words"
                )
            if len(word) > MAX_BAD_WORD:
                text = self.tokenizer.decode(word)
                raise InvalidParams(
                    f"bad_words: {text!r} has {len(word)} tokens, the limit is {MAX_BAD_WORD}; give a part of it",
                    param="bad_words",
                )
        if (total := sum(map(len, words))) > MAX_BAD_WORDS:
            raise InvalidParams(
                f"bad_words have {total} tokens together, the limit is {MAX_BAD_WORDS}; remove some", param="bad_words"
            )
        return words


def _snapshot(given: object) -> SamplingParams:
    if not isinstance(given, SamplingParams):
        raise InvalidParams(f"sampling_params is {type(given).__name__}; give SamplingParams or a list of them")
    return given.snapshot()


def num_logprobs(params: SamplingParams) -> int:
    """The largest number of logprobs that one token of the answer or of the prompt has."""
    return max((params.logprobs or 0) + len(params.requested_ids), params.prompt_logprobs or 0)


def has_few_logprobs(params: SamplingParams) -> bool:
    """Whether the logprobs of one token are few enough that `check_num_logprobs` cannot raise."""
    return num_logprobs(params) <= _UNCHECKED_LOGPROBS


# Prompts given as token embeddings: `{"prompt_embeds": tensor}`, as a torch tensor or a numpy array.
#
# The core gets them as numpy values. This file never imports torch: tensors are converted by their own methods.

Values = np.ndarray[Any, Any]

_PARAM = "prompt_embeds"
_DTYPES = ("float16", "bfloat16", "float32", "float64")


def has_embeds(prompt: Mapping[str, Any]) -> bool:
    return prompt.get(_PARAM) is not None


def embedded_submit(message: Submit, prompt: Mapping[str, Any], description: ModelDescription) -> Submit:
    """The message with the embeddings of the prompt, and 0 for each of its token ids."""
    assert isinstance(message.params, SamplingParams)
    if not description.embed_size:
        raise InvalidPrompt(
            f"{description.name} takes no prompt_embeds; start the engine with enable_prompt_embeds, or give a text or "
            "token ids",
            param=_PARAM,
        )
    if prompt.get("prompt_token_ids") is not None:
        raise InvalidPrompt("prompt_embeds and prompt_token_ids are both given; remove one", param=_PARAM)
    for name in ("prompt_logprobs", "truncate_prompt_tokens"):
        if getattr(message.params, name) is not None:
            raise InvalidParams(f"{name} needs the token ids of the prompt, and prompt_embeds has none", param=name)
    values = check_embeds(prompt[_PARAM], description)
    digest = blake2b(message.cache_salt.encode() + b"\0", digest_size=32)
    digest.update(values.data)
    return msgspec.structs.replace(
        message,
        prompt_token_ids=[0] * len(values),
        prompt_embeds=PromptEmbeds.of(values),
        cache_salt=f"{_PARAM} {digest.hexdigest()}",
    )


def check_embeds(given: Any, description: ModelDescription) -> Values:
    """[tokens, hidden size] in the dtype that the core takes. `given` may have a leading dimension of 1."""
    size = description.embed_size
    wanted = f"give a float tensor [tokens, {size}]"
    shape = tuple(getattr(given, "shape", ()))
    if len(shape) == 3 and shape[0] == 1:
        shape, given = shape[1:], given[0]
    if len(shape) != 2 or shape[1] != size:
        found = list(shape) if hasattr(given, "shape") else type(given).__name__
        raise InvalidPrompt(f"prompt_embeds is {found}; {wanted}", param=_PARAM)
    if (name := str(given.dtype).removeprefix("torch.")) not in _DTYPES:
        raise InvalidPrompt(f"prompt_embeds has the dtype {name}; {wanted}", param=_PARAM)
    if "sparse" in str(getattr(given, "layout", "")):
        raise InvalidPrompt(f"prompt_embeds is a sparse tensor; {wanted}", param=_PARAM)
    if not shape[0]:
        raise InvalidPrompt(f"prompt_embeds has no tokens; {wanted} with at least one", param=_PARAM)
    if shape[0] >= (limit := description.max_model_len):
        raise InvalidPrompt(
            f"prompt_embeds has {shape[0]} tokens, {description.name} takes {limit} including at least one generated "
            "token; shorten it",
            param=_PARAM,
        )
    if not isinstance(given, np.ndarray):
        given = given.detach().cpu()
        given = (given.double() if description.dtype == "float64" else given.float()).numpy()
    values = np.ascontiguousarray(given, np.float64 if description.dtype == "float64" else np.float32)
    if not np.isfinite(values).all():
        raise InvalidPrompt("prompt_embeds has NaN or infinite values; remove them", param=_PARAM)
    return values


# StructuredOutputsConfig: vLLM's structured_outputs_config, the defaults of structured output for all requests.


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # any of vLLM's: llguidance compiles all grammars
    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: Literal[""] = ""
    enable_in_reasoning: Literal[False] = False

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request, with these defaults for its JSON schema."""
        wanted = params.structured_outputs
        names = [name for name in ("disable_any_whitespace", "disable_additional_properties") if getattr(self, name)]
        if wanted is None or not (wanted.json or wanted.json_object):
            return params
        changes: dict[str, Any] = dict.fromkeys(names, True)
        if self.backend == "outlines" and not self.disable_any_whitespace and wanted.whitespace_pattern is None:
            changes["whitespace_pattern"] = "[ ]?"  # of outlines: no line breaks
        if not changes:
            return params
        return params.with_changes(structured_outputs=msgspec.structs.replace(wanted, **changes))


def read_structured_config(given: object) -> StructuredOutputsConfig:
    """From an object with these fields, a mapping or its JSON."""
    try:
        if isinstance(given, str | bytes):
            given = msgspec.json.decode(given)
        elif isinstance(given, StructuredOutputsConfig):
            given = msgspec.structs.asdict(given)  # and check the values
        fields: Any = given if isinstance(given, Mapping) else vars(given)
        return msgspec.convert(dict(fields), StructuredOutputsConfig)
    except (msgspec.MsgspecError, TypeError) as error:
        known = ", ".join(StructuredOutputsConfig.__struct_fields__)
        raise InvalidOption(f"structured_outputs_config: {error}; it has {known}") from None
