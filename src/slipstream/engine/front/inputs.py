"""InputProcessor: a prompt and its parameters become a Submit, or a clear exception."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.config.generation import GenerationDefaults
from slipstream.errors import BadTokenizer, InvalidParams, InvalidPrompt, PromptTooLong
from slipstream.messages import Submit
from slipstream.params import MAX_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from slipstream.text.chat import render_chat
from slipstream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]

_TAKEN = {"template", "messages", "add_generation_prompt", "continue_final_message", "tools", "special_tokens"}

MAX_REPORTED = 2**24  # logprobs in one answer
_FEW = 100  # logprobs a token that nobody need think about
_BYTES_EACH = 250  # about what one takes in the answer: a key, a number, a rank, a text
_ENCODED_AT_ONCE = 2**21  # characters


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        max_model_len: int,
        vocab_size: int,
        model_name: str,
        max_positions: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_name = model_name
        self.can_grow = max_model_len < max_positions  # whether a higher max_model_len would help
        self._settled: tuple[SamplingParams | None, SamplingParams] | None = None  # as given last, and settled
        self._ids_type = list[Annotated[int, msgspec.Meta(ge=0, lt=vocab_size)]]
        self.instead: tuple[str, ...] = ()  # what a model does that continues no text

    def default_params(self) -> SamplingParams:
        """What the model's generation_config asks for, our own defaults elsewhere."""
        return SamplingParams(**self.defaults.params)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        encoded: list[int] | None = None,
    ) -> tuple[Submit, str | None]:
        """The message for the core, and the prompt's text if it was given as one.

        A priority or salt given here counts more than one in the prompt object, and that more than the parameters'.
        `encoded` is what `encode_texts` has made of the prompt.
        """
        self._check_generates()
        params = self._settle(params)
        if cache_salt is None and isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
        if priority is not None or cache_salt is not None:
            changes = {"priority": priority, "cache_salt": cache_salt}
            params = params.with_changes(**{name: value for name, value in changes.items() if value is not None})
        text, ids = (text_of(prompt), encoded) if encoded else self._tokens(prompt, add_special_tokens)
        if params.truncate_prompt_tokens is not None:
            keep = params.truncate_prompt_tokens
            ids = ids[-(keep if keep > 0 else self.max_model_len - 1) :]
        if not ids:
            raise InvalidPrompt("the prompt has no tokens; give at least one")
        if len(ids) >= self.max_model_len:
            way_out = "shorten it or set truncate_prompt_tokens" + (", or raise max_model_len" if self.can_grow else "")
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, {self.model_name} takes {self.max_model_len} with at least one "
                f"of them for the answer; {way_out}"
            )
        self._check_report(params, len(ids))
        bad_words = self._bad_words(params)
        message = Submit(request_id, ids, params, time.time(), params.priority, params.cache_salt, bad_words)
        return message, text

    def encode_texts(self, prompts: Sequence[Prompt], add_special_tokens: bool) -> list[list[int] | None]:
        """Token ids of the prompts that are texts, many at a time: the tokenizer then has all cores.

        None for the others, and for those that `submit` should complain about in their turn.
        """
        found: list[list[int] | None] = [None] * len(prompts)
        texts = {place: text for place, prompt in enumerate(prompts) if (text := text_of(prompt))}
        if self.tokenizer is None or len(texts) < 2:
            return found
        for places in _portions(texts):
            try:
                ids = self.tokenizer.encode_batch([texts[place] for place in places], add_special_tokens)
            except InvalidPrompt:
                continue
            for place, own in zip(places, ids, strict=True):
                found[place] = own
        return found

    def render_chat(self, messages: Sequence[Message], **how: Any) -> str:
        """A conversation to be continued, as the text of a prompt."""
        self._check_generates()
        return self.render_messages(messages, **how)

    def render_messages(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The same for whatever is to be done with it."""
        tokenizer = self._need_tokenizer("messages")
        if clash := _TAKEN & set(chat_template_kwargs or ()):
            raise InvalidParams(
                f"chat_template_kwargs holds {sorted(clash)}, which mean something already; rename them"
            )
        return render_chat(
            tokenizer.chat_template(with_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=tokenizer.special_tokens,
            **(chat_template_kwargs or {}),
        )

    def _check_generates(self) -> None:
        if self.instead:
            raise InvalidParams(
                f"{self.model_name} continues no text; it does {', '.join(self.instead)}: use encode, or another model"
            )

    def _tokens(self, prompt: Prompt, add_special_tokens: bool) -> tuple[str | None, list[int]]:
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                return text, self._checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidPrompt(f"a prompt object has prompt or prompt_token_ids; this one has {sorted(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._need_tokenizer("text").encode(prompt, add_special_tokens)
        if isinstance(prompt, Sequence):
            return None, self._checked_ids(prompt)
        raise InvalidPrompt(f"a prompt is a string, a list of token ids or an object; this is {type(prompt).__name__}")

    def _checked_ids(self, ids: object) -> list[int]:
        # numpy integers and the like count as whole numbers too
        if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
            raise InvalidPrompt(f"prompt_token_ids is {type(ids).__name__}; give a list of token ids")
        try:
            return msgspec.convert(ids, self._ids_type)  # the usual case: a copy, at the speed of C
        except msgspec.ValidationError:
            pass  # other kinds of whole numbers, or something to complain about
        checked = []
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidPrompt(f"token id {token!r} is not a whole number")
            token = token.__index__()
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(f"token id {token} is unknown; {self.model_name} has 0 to {self.vocab_size - 1}")
            checked.append(token)
        return checked

    def _settle(self, given: SamplingParams | None) -> SamplingParams:
        """Checked, and -1 replaced by what it means. Mostly all prompts of a call have the same."""
        last = self._settled
        if last is None or last[0] is not given or last[1].logit_bias:  # a dict, which may have been changed
            params = self.default_params() if given is None else given
            self._check_params(params)
            whole = [name for name in ("logprobs", "prompt_logprobs") if getattr(params, name) == -1]
            if whole:
                params = params.with_changes(**dict.fromkeys(whole, self.vocab_size))
            self._settled = last = given, params
        return last[1]

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidParams(f"sampling_params is {type(params).__name__}; give SamplingParams or a list of them")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            # the largest stands for all: they are whole numbers from 0 up, each there once
            if (ids := getattr(params, name)) and (token := max(ids)) >= self.vocab_size:
                raise InvalidParams(f"{name} holds {token}; {self.model_name} has 0 to {self.vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise InvalidParams(
                    f"{name} is {getattr(params, name)}; the vocabulary has {self.vocab_size}, "
                    "ask for fewer, or for -1 to have it whole"
                )
        if params.min_tokens >= self.max_model_len:
            raise InvalidParams(f"min_tokens is {params.min_tokens}, the model length {self.max_model_len}; lower it")
        if params.stop_strings and self.tokenizer is None:
            raise InvalidParams("stop strings need a tokenizer, and there is none; use stop_token_ids")
        if params.bad_words and self.tokenizer is None:
            raise InvalidParams("bad_words need a tokenizer, and there is none; use logit_bias to keep tokens away")

    def _check_report(self, params: SamplingParams, num_prompt: int) -> None:
        """Refuse what would fill the memory with logprobs, before anything runs."""
        each = (params.logprobs or 0) + len(params.given_ids)
        num_new = self.max_model_len - num_prompt
        if params.max_tokens is not None:
            num_new = min(num_new, params.max_tokens)
        of_prompt = params.prompt_logprobs or 0
        total = (params.n * num_new * each if each > _FEW else 0) + (num_prompt * of_prompt if of_prompt > _FEW else 0)
        if total > MAX_REPORTED:
            raise InvalidParams(
                f"logprobs would come to {total:,}, about {total * _BYTES_EACH / 2**30:.1f} GiB: {each} for each of up "
                f"to {params.n * num_new} new tokens, {of_prompt} for each of {num_prompt} prompt tokens; an answer "
                f"takes {MAX_REPORTED:,}; lower logprobs, prompt_logprobs, max_tokens or n"
            )

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Each word as it is at the beginning of a text and as it is after a space."""
        if not params.bad_words:
            return []
        assert self.tokenizer is not None
        bare = [word.lstrip() for word in params.bad_words]
        plain = self.tokenizer.encode_batch(bare, add_special_tokens=False)
        spaced = self.tokenizer.encode_batch([" " + word for word in bare], add_special_tokens=False)
        found: dict[tuple[int, ...], None] = {}
        for alone, after_space in zip(plain, spaced, strict=True):
            found[tuple(alone)] = None
            # where the space is a token of its own the word is there already
            if after_space[-len(alone) :] != alone:
                found[tuple(after_space)] = None
        words = [list(word) for word in found if word]
        for word in words:
            if len(word) > MAX_BAD_WORD:
                text = self.tokenizer.decode(word)
                raise InvalidParams(
                    f"bad_words: {text!r} has {len(word)} tokens, {MAX_BAD_WORD} are the most; give a part of it"
                )
        if (total := sum(map(len, words))) > MAX_BAD_WORDS:
            raise InvalidParams(f"bad_words come to {total} tokens, {MAX_BAD_WORDS} are the most; leave some out")
        return words

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise BadTokenizer(f"the prompt is {what} and skip_tokenizer_init is set; give token ids or unset it")
        return self.tokenizer


def text_of(prompt: Prompt) -> str | None:
    """If it is one to be encoded."""
    if isinstance(prompt, Mapping) and "prompt_token_ids" not in prompt:
        prompt = prompt.get("prompt", ())
    return prompt if isinstance(prompt, str) else None


def _portions(texts: Mapping[int, str]) -> Iterator[list[int]]:
    """Places of texts that are encoded together: not all at once, since a tokenizer notes much about each token."""
    places: list[int] = []
    size = 0
    for place, text in texts.items():
        places.append(place)
        size += len(text)
        if size >= _ENCODED_AT_ONCE:
            yield places
            places, size = [], 0
    if places:
        yield places
