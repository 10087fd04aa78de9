"""InputProcessor: a prompt and its parameters become a Submit, or a clear exception."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.config.generation import GenerationDefaults
from slipstream.errors import BadTokenizer, InvalidParams, InvalidPrompt, PromptTooLong
from slipstream.messages import Submit
from slipstream.params import SamplingParams
from slipstream.text.chat import render_chat
from slipstream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class InputProcessor:
    def __init__(
        self,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        max_model_len: int,
        vocab_size: int,
        model_name: str,
    ) -> None:
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.model_name = model_name

    def default_params(self) -> SamplingParams:
        """What the model's generation_config asks for, our own defaults elsewhere."""
        return SamplingParams(**self.defaults.params)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int = 0,
        cache_salt: str = "",
        add_special_tokens: bool = True,
    ) -> tuple[Submit, str | None]:
        """The message for the core, and the prompt's text if it was given as one."""
        params = self.default_params() if params is None else params
        self._check_params(params)
        text, ids = self._tokens(prompt, add_special_tokens)
        if not ids:
            raise InvalidPrompt("the prompt has no tokens; give at least one")
        if len(ids) >= self.max_model_len:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, {self.model_name} takes {self.max_model_len} with at least one "
                "of them for the answer; shorten the prompt or raise max_model_len"
            )
        message = Submit(request_id, ids, params, time.time(), priority, cache_salt)
        return message, text

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        tokenizer = self._need_tokenizer("messages")
        return render_chat(
            tokenizer.chat_template(with_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=tokenizer.special_tokens,
            **(chat_template_kwargs or {}),
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
        checked = []
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidPrompt(f"token id {token!r} is not a whole number")
            token = token.__index__()
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(f"token id {token} is unknown; {self.model_name} has 0 to {self.vocab_size - 1}")
            checked.append(token)
        return checked

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidParams(f"sampling_params is {type(params).__name__}; give SamplingParams or a list of them")
        for token in params.stop_ids:
            if token >= self.vocab_size:
                raise InvalidParams(f"stop_token_ids holds {token}; {self.model_name} has 0 to {self.vocab_size - 1}")
        if params.logprobs is not None and params.logprobs > self.vocab_size:
            raise InvalidParams(f"logprobs is {params.logprobs}; the vocabulary has {self.vocab_size}, ask for fewer")
        if params.stop_strings and self.tokenizer is None:
            raise InvalidParams("stop strings need a tokenizer, and there is none; use stop_token_ids")

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise BadTokenizer(f"the prompt is {what} and skip_tokenizer_init is set; give token ids or unset it")
        return self.tokenizer
