"""InputProcessor: a prompt and its parameters become a Submit, or a clear exception."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec

from slipstream.engine.model_description import ModelDescription
from slipstream.errors import BadTokenizer, InvalidParams, InvalidPrompt, PromptTooLong
from slipstream.messages import Submit
from slipstream.params import MAX_BAD_WORD, MAX_BAD_WORDS, SamplingParams
from slipstream.text.chat import render_chat
from slipstream.text.control_tokens import ControlTokens
from slipstream.text.excerpt import Excerpts
from slipstream.text.guarded import plain
from slipstream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
Prepared = tuple[Submit, str | None]
"""A prompt as the core takes it, and its text."""

_TAKEN = {
    "template", "messages", "add_generation_prompt", "continue_final_message", "tools", "special_tokens", "controls",
}  # fmt: skip

MAX_REPORTED = 2**24  # logprobs in one answer
_FEW = 100  # logprobs a token that nobody need think about
_BYTES_EACH = 250  # about what one takes in the answer: a key, a number, a rank, a text
_ADDED = 16  # tokens that a tokenizer puts around a text, at most


class InputProcessor:
    def __init__(self, facts: ModelDescription, tokenizer: Tokenizer | None) -> None:
        self.facts = facts
        self.tokenizer = tokenizer
        self._excerpts = None if tokenizer is None else Excerpts(tokenizer)
        self._controls_of: dict[str, ControlTokens] = {}  # by chat template
        self._settled: tuple[SamplingParams | None, SamplingParams] | None = None  # as given last, and settled
        # a tokenizer may have tokens that the model has no vectors for
        self._has_extra_tokens = tokenizer is not None and tokenizer.vocab_size > facts.vocab_size
        self._ids_type = list[Annotated[int, msgspec.Meta(ge=0, lt=facts.vocab_size)]]

    def default_params(self) -> SamplingParams:
        """What the model's generation_config asks for, our own defaults elsewhere."""
        return SamplingParams(**self.facts.defaults.params)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> Prepared:
        """The message for the core, and the prompt's text if it was given as one.

        A priority or salt given here counts more than one in the prompt object, and that more than the parameters'.
        """
        message, text = self.ask(request_id, prompt, params, priority=priority, cache_salt=cache_salt)
        if not message.prompt_token_ids:
            read = self.to_read(message, text or "")
            message = self.complete(message, self.encode([read], add_special_tokens)[0])
        return message, text and plain(text)

    def ask(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
    ) -> Prepared:
        """Likewise, but a text is not encoded: its message has no token ids, and waits for `complete`."""
        self._check_generates()
        params = self._settle(params)
        if cache_salt is None and isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
        if priority is not None or cache_salt is not None:
            changes = {"priority": priority, "cache_salt": cache_salt}
            params = params.with_changes(**{name: value for name, value in changes.items() if value is not None})
        text, ids = self._read(prompt)
        bad_words = self._bad_words(params)
        message = Submit(request_id, [], params, time.time(), params.priority, params.cache_salt, bad_words)
        return (message if ids is None else self.complete(message, ids)), text

    def to_read(self, message: Submit, text: str) -> str:
        """What must be tokenised of a text: all of it, or an end where it is cut to its last tokens.

        A text that is far too long is refused here, before all of it is read.
        """
        params, most = message.params, self.facts.max_model_len
        assert isinstance(params, SamplingParams)
        excerpts = self._excerpts
        if excerpts is None or excerpts.is_short(text, most):
            return text
        if (keep := params.truncate_prompt_tokens) is not None:
            return excerpts.end(text, keep if keep > 0 else most - 1)
        if excerpts.exceeds(text, most):
            fact = f"the prompt has {len(text)} characters and more than {most} tokens, {self.facts.name} takes {most}"
            raise PromptTooLong(f"{fact} with at least one of them for the answer; {self.facts.way_out}")
        return text

    def complete(self, message: Submit, ids: list[int]) -> Submit:
        """With the prompt's token ids."""
        params, most = message.params, self.facts.max_model_len
        assert isinstance(params, SamplingParams)
        if (keep := params.truncate_prompt_tokens) is not None:
            ids = ids[-(keep if keep > 0 else most - 1) :]
        if not ids:
            raise InvalidPrompt("the prompt has no tokens; give at least one")
        if len(ids) >= most:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, {self.facts.name} takes {most} with at least one of them for the "
                f"answer; {self.facts.way_out}"
            )
        if self._has_extra_tokens and (token := max(ids)) >= self.facts.vocab_size:
            assert self.tokenizer is not None
            raise InvalidPrompt(
                f"the prompt holds {self.tokenizer.piece(token)!r}, token id {token} of the tokenizer; "
                f"{self.facts.known_ids}, leave it out"
            )
        self._check_report(params, len(ids))
        return msgspec.structs.replace(message, prompt_token_ids=ids)

    def surely_fits(self, message: Submit, text: str) -> bool:
        """Whether `complete` will have nothing to say against this text, whatever its tokens are: a token has a byte at
        least. Only tokenizers that make a text longer before they cut it could prove this wrong."""
        params = message.params
        assert isinstance(params, SamplingParams)
        if self._has_extra_tokens or _most_reported(params) > _FEW or not text or text.isspace():
            return False
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            return False
        most, keep = self.facts.max_model_len, params.truncate_prompt_tokens
        return size + _ADDED < most or (keep is not None and keep < most)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Together, so that the tokenizer has all cores."""
        return self._need_tokenizer().encode_batch(texts, add_special_tokens)

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
        allow_control_tokens: bool | None = None,
    ) -> str:
        """The text of messages for any task. `allow_control_tokens`: whether text of messages may spell control tokens;
        None takes the engine's option."""
        tokenizer = self._need_tokenizer("messages")
        if clash := _TAKEN & set(chat_template_kwargs or ()):
            raise InvalidParams(
                f"chat_template_kwargs holds {sorted(clash)}, which mean something already; rename them",
                param="chat_template_kwargs",
            )
        template = tokenizer.chat_template(with_tools=bool(tools))
        allowed = self.facts.allow_control_tokens if allow_control_tokens is None else allow_control_tokens
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=tokenizer.special_tokens,
            controls=None if allowed or template is None else self._controls(tokenizer, template),
            **(chat_template_kwargs or {}),
        )

    def _controls(self, tokenizer: Tokenizer, template: str) -> ControlTokens:
        """Built once per template; a model has one or two."""
        controls = self._controls_of.get(template)
        if controls is None:
            controls = self._controls_of[template] = ControlTokens(tokenizer, template)
        return controls

    def _check_generates(self) -> None:
        if (pooling := self.facts.pooling) is not None and not pooling.generates:
            why = f" ({pooling.why_silent})" if pooling.why_silent else ""
            raise InvalidParams(
                f"{self.facts.name} continues no text{why}; it does {', '.join(pooling.tasks)}: use encode, or another "
                "model",
                param="model",
            )

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """Its text, its token ids. A text that was given alone has none yet."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                text = prompt.get("prompt")
                return text, self._checked_ids(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise InvalidPrompt(f"a prompt object has prompt or prompt_token_ids; this one has {sorted(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            self._need_tokenizer()
            return prompt, None
        if isinstance(prompt, Sequence):
            return None, self._checked_ids(prompt)
        raise InvalidPrompt(f"a prompt is a string, a list of token ids or an object; this is {type(prompt).__name__}")

    def _checked_ids(self, ids: object) -> list[int]:
        # numpy integers and the like count as whole numbers too
        if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
            raise InvalidPrompt(f"prompt_token_ids is {type(ids).__name__}; give a list of token ids")
        try:
            return msgspec.convert(ids, self._ids_type)  # the usual case: a copy, at the speed of C
        except (msgspec.ValidationError, UnicodeEncodeError):
            pass  # other kinds of whole numbers, or something to complain about
        checked = []
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidPrompt(f"token id {token!r} is not a whole number")
            token = token.__index__()
            if not 0 <= token < self.facts.vocab_size:
                raise InvalidPrompt(f"token id {token} is unknown; {self.facts.known_ids}")
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
                params = params.with_changes(**dict.fromkeys(whole, self.facts.vocab_size))
            self._settled = last = given, params
        return last[1]

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidParams(f"sampling_params is {type(params).__name__}; give SamplingParams or a list of them")
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids", "logit_bias"):
            # the largest stands for all: they are whole numbers from 0 up, each there once
            if (ids := getattr(params, name)) and (token := max(ids)) >= self.facts.vocab_size:
                raise InvalidParams(f"{name} holds {token}; {self.facts.known_ids}", param=name)
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.facts.vocab_size:
                raise InvalidParams(
                    f"{name} is {getattr(params, name)}; the vocabulary has {self.facts.vocab_size}, "
                    "ask for fewer, or for -1 to have it whole",
                    param=name,
                )
        if params.min_tokens >= (most := self.facts.max_model_len):
            raise InvalidParams(
                f"min_tokens is {params.min_tokens}, the model length {most}; lower it", param="min_tokens"
            )
        if (room := self.facts.max_waiting) is not None and params.n > room:
            raise InvalidParams(
                f"n is {params.n}, and no more than {room} may wait; lower it or raise max_waiting", param="n"
            )
        if params.stop_strings and self.tokenizer is None:
            raise InvalidParams("stop strings need a tokenizer, and there is none; use stop_token_ids", param="stop")
        if params.bad_words and self.tokenizer is None:
            raise InvalidParams(
                "bad_words need a tokenizer, and there is none; use logit_bias to keep tokens away", param="bad_words"
            )

    def _check_report(self, params: SamplingParams, num_prompt: int) -> None:
        """Refuse what would fill the memory with logprobs, before anything runs."""
        each = (params.logprobs or 0) + len(params.given_ids)
        num_new = self.facts.max_model_len - num_prompt
        if params.max_tokens is not None:
            num_new = min(num_new, params.max_tokens)
        of_prompt = params.prompt_logprobs or 0
        total = (params.n * num_new * each if each > _FEW else 0) + (num_prompt * of_prompt if of_prompt > _FEW else 0)
        if total > MAX_REPORTED:
            raise InvalidParams(
                f"logprobs would come to {total:,}, about {total * _BYTES_EACH / 2**30:.1f} GiB: {each} for each of up "
                f"to {params.n * num_new} new tokens, {of_prompt} for each of {num_prompt} prompt tokens; an answer "
                f"takes {MAX_REPORTED:,}; lower logprobs, prompt_logprobs, max_tokens or n",
                param="logprobs" if each > _FEW else "prompt_logprobs",
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
            if max(word) >= self.facts.vocab_size:
                raise InvalidParams(
                    f"bad_words hold token id {max(word)}; {self.facts.known_ids}, leave it out", param="bad_words"
                )
            if len(word) > MAX_BAD_WORD:
                text = self.tokenizer.decode(word)
                raise InvalidParams(
                    f"bad_words: {text!r} has {len(word)} tokens, {MAX_BAD_WORD} are the most; give a part of it",
                    param="bad_words",
                )
        if (total := sum(map(len, words))) > MAX_BAD_WORDS:
            raise InvalidParams(
                f"bad_words come to {total} tokens, {MAX_BAD_WORDS} are the most; leave some out", param="bad_words"
            )
        return words

    def _need_tokenizer(self, what: str = "text") -> Tokenizer:
        if self.tokenizer is None:
            raise BadTokenizer(f"the prompt is {what} and skip_tokenizer_init is set; give token ids or unset it")
        return self.tokenizer


def _most_reported(params: SamplingParams) -> int:
    """Logprobs of one token."""
    return max((params.logprobs or 0) + len(params.given_ids), params.prompt_logprobs or 0)
