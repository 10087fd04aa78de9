"""InputProcessor: checks a prompt and its SamplingParams, renders chat templates, tokenises, and builds `Submit`.

Every user error of a generation request is raised here, before the request reaches the core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.base.errors import InvalidOption, InvalidParams, InvalidPrompt, PromptTooLong
from slipstream.checkpoint.generation import ReasoningConfig
from slipstream.contracts.messages import Submit
from slipstream.engine.model_description import ModelDescription
from slipstream.front.images import FIELD, ImagePrompts, LoadedImages, has_images
from slipstream.front.param_checks import ParamChecks, embedded_submit, has_embeds, has_few_logprobs
from slipstream.params.lora import LoRARequest
from slipstream.params.sampling import SamplingParams
from slipstream.params.thinking import Thinking
from slipstream.parsers.families import reasoning_of
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat
from slipstream.text.chat_template import load_chat_template, render_chat
from slipstream.text.control_tokens import ControlTokens
from slipstream.text.excerpt import Excerpts
from slipstream.text.guarded import plain
from slipstream.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]
PreparedPrompt = tuple[Submit, str | None]
"""The message for the core, and the prompt's text if it was given as text."""

_RESERVED = {
    "template", "messages", "add_generation_prompt", "continue_final_message", "tools", "special_tokens", "controls",
}  # fmt: skip

_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "prompt_embeds", "multi_modal_data", "cache_salt")
_MAX_ADDED = 16  # upper bound of the special tokens that a tokenizer adds to a text


class InputProcessor:
    def __init__(self, description: ModelDescription, tokenizer: Tokenizer | None) -> None:
        self.description = description
        self.tokenizer = tokenizer
        self.checks = ParamChecks(description, tokenizer)
        self.images = ImagePrompts(description)
        self._excerpts = None if tokenizer is None else Excerpts(tokenizer)
        self._controls_of: dict[str, ControlTokens] = {}  # by chat template
        self.reasoning_parser: str | None = None  # name, by FrontEndArgs or a server; None: by the chat template
        self._thinking_markers: ThinkingMarkers | None = None
        # a tokenizer may have tokens that the model has no embedding for
        self._has_extra_tokens = tokenizer is not None and tokenizer.vocab_size > description.vocab_size
        self._ids_type = list[Annotated[int, msgspec.Meta(ge=0, lt=description.vocab_size)]]

    def default_params(self) -> SamplingParams:
        """The parameters of the model's generation_config.json, and our own defaults for the others."""
        return self.checks.defaults()

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
        add_special_tokens: bool = True,
    ) -> PreparedPrompt:
        """Returns the message for the core, and the prompt's text if it was given as text.

        `priority` and `cache_salt` override those of the prompt object, which override those of the parameters.
        """
        message, text = self.prepare_text(
            request_id, prompt, params, priority=priority, cache_salt=cache_salt, lora_request=lora_request
        )
        if not message.prompt_token_ids:
            read = self.to_tokenise(message, text or "")
            message = self.complete(message, self.encode([read], add_special_tokens)[0])
        return message, text and plain(text)

    def prepare_text(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None,
        *,
        priority: int | None = None,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PreparedPrompt:
        """Like `prepare`, but does not tokenise: the message of a text has no token ids until `complete` adds them."""
        self._check_generates()
        params = self.checks.resolve(params)
        if cache_salt is None and isinstance(prompt, Mapping):
            cache_salt = prompt.get("cache_salt")
        if priority is not None or cache_salt is not None:
            changes = {"priority": priority, "cache_salt": cache_salt}
            params = params.with_changes(**{name: value for name, value in changes.items() if value is not None})
        text, ids = self._read(prompt)
        bad_words = self.checks.bad_words(params)
        message = Submit(request_id, [], params, time.time(), params.priority, params.cache_salt, bad_words)
        if lora_request is not None:
            message = msgspec.structs.replace(message, lora=self.description.check_adapter(lora_request))
        if isinstance(prompt, Mapping) and has_embeds(prompt):
            if has_images(prompt):
                raise InvalidPrompt("prompt_embeds and multi_modal_data are both given; remove one", param=FIELD)
            return embedded_submit(message, prompt, self.description), text
        if isinstance(prompt, Mapping) and has_images(prompt):
            return self._with_images(message, prompt[FIELD], text, ids), text and plain(text)
        return (message if ids is None else self.complete(message, ids)), text

    def _with_images(self, message: Submit, loaded: object, text: str | None, ids: list[int] | None) -> Submit:
        """Returns the message with its images and token ids."""
        self.images.check_takes_images()
        assert isinstance(message.params, SamplingParams)
        if ids is None:
            self.check_length(text or "")
            special = isinstance(loaded, LoadedImages) and loaded.add_special_tokens
            ids = self.encode([text or ""], special)[0]
        ids, images = self.images.expand(loaded, ids, message.params)
        return msgspec.structs.replace(self.complete(message, ids), images=images)

    def to_tokenise(self, message: Submit, text: str) -> str:
        """Returns the part of a text that must be tokenised: its end, where truncate_prompt_tokens cuts it, else all.

        Raises for a text that is far too long, without tokenising all of it.
        """
        params, limit = message.params, self.description.max_model_len
        assert isinstance(params, SamplingParams)
        excerpts = self._excerpts
        if excerpts is None or excerpts.is_short(text, limit):
            return text
        if (keep := params.truncate_prompt_tokens) is not None:
            return excerpts.end(text, keep if keep > 0 else limit - 1)
        self.check_length(text)
        return text

    def check_length(self, text: str) -> None:
        """Raises for a text that is far too long, without tokenising all of it."""
        excerpts, limit = self._excerpts, self.description.max_model_len
        if excerpts is not None and not excerpts.is_short(text, limit) and excerpts.exceeds(text, limit):
            name = self.description.name
            fact = f"the prompt has {len(text)} characters and more than {limit} tokens, and {name}'s maximum context"
            raise PromptTooLong(f"{fact} length is {limit} with one generated token. {self.description.too_long_hint}")

    def complete(self, message: Submit, ids: list[int]) -> Submit:
        """Returns the message with the prompt's token ids, truncated and checked."""
        params, limit = message.params, self.description.max_model_len
        assert isinstance(params, SamplingParams)
        if (keep := params.truncate_prompt_tokens) is not None:
            ids = ids[-(keep if keep > 0 else limit - 1) :]
        if not ids:
            raise InvalidPrompt("the decoder prompt cannot be empty; give at least one token")
        if len(ids) >= limit:
            raise PromptTooLong(
                f"the prompt has {len(ids)} tokens, and {self.description.name}'s maximum context length is {limit} "
                f"with one generated token. {self.description.too_long_hint}"
            )
        if self._has_extra_tokens and (token := max(ids)) >= self.description.vocab_size:
            assert self.tokenizer is not None
            raise InvalidPrompt(
                f"the prompt has {self.tokenizer.piece(token)!r}, token id {token} of the tokenizer; "
                f"{self.description.known_ids}, remove it"
            )
        self.checks.check_num_logprobs(params, len(ids))
        thinking = None
        if params.thinking_token_budget is not None:
            thinking = self._thinking().of(ids, params)
            check_forced(thinking, self.description)
        return msgspec.structs.replace(message, prompt_token_ids=ids, thinking=thinking)

    def _thinking(self) -> ThinkingMarkers:
        if self._thinking_markers is None:
            if self.tokenizer is None:
                raise InvalidParams(
                    "thinking_token_budget needs a tokenizer, and `skip_tokenizer_init=True` is set; unset it",
                    param="thinking_token_budget",
                )
            config = self.description.reasoning_config
            self._thinking_markers = ThinkingMarkers(self.tokenizer, config, self.reasoning_parser)
        return self._thinking_markers

    def surely_fits(self, message: Submit, text: str) -> bool:
        """Whether `complete` cannot raise for this text, known without tokenising: a token has at least one byte.

        This assumes a tokenizer whose normalisation does not make a text longer.
        """
        params = message.params
        assert isinstance(params, SamplingParams)
        if params.thinking_token_budget is not None:
            return False
        if self._has_extra_tokens or not has_few_logprobs(params) or not text or text.isspace():
            return False
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            return False
        limit, keep = self.description.max_model_len, params.truncate_prompt_tokens
        return size + _MAX_ADDED < limit or (keep is not None and keep < limit)

    def encode(self, texts: list[str], add_special_tokens: bool) -> list[list[int]]:
        """Returns the token ids of each text. One call, so that the tokenizer can use all CPU cores."""
        return self._need_tokenizer().encode_batch(texts, add_special_tokens)

    def render_chat(self, messages: Sequence[Message], **how: Any) -> str:
        """Returns the prompt text of a conversation, for a model that generates. `how`: see `render_messages`."""
        self._check_generates()
        return self.render_messages(messages, **how)

    def render_chat_prompt(self, messages: Sequence[Message], **how: Any) -> Prompt:
        """As `render_chat`, for messages that may have images: then the prompt has them too."""
        messages, images = self.images.take_parts(messages)
        text = self.render_chat(messages, **how)
        return {"prompt": text, FIELD: {"image": images}} if images else text

    def render_messages(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        allow_control_tokens: bool | None = None,
    ) -> str:
        """Returns the text that the chat template makes of messages, for any task. `chat_template`: a template or its
        path, instead of the model's.

        `allow_control_tokens`: whether control tokens in the text of messages are encoded as such; None uses the
        engine's option.
        """
        tokenizer = self._need_tokenizer("messages")
        if clash := _RESERVED & set(chat_template_kwargs or ()):
            raise InvalidParams(
                f"chat_template_kwargs has {sorted(clash)}, which are reserved names; rename them",
                param="chat_template_kwargs",
            )
        template = tokenizer.chat_template(with_tools=bool(tools))
        if chat_template is not None:
            template = load_chat_template(chat_template)
        return render_chat(
            template,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            special_tokens=tokenizer.special_tokens,
            controls=self._controls(template, allow_control_tokens),
            **(chat_template_kwargs or {}),
        )

    def before_reply(self, text: str, reply: str) -> str:
        """A text of a request, and behind it what the chat template wrote."""
        controls = self._controls(self._need_tokenizer().chat_template(), None)
        return text + reply if controls is None else controls.unmask(controls.mask(text) + reply)

    def _controls(self, template: str | None, allowed: bool | None) -> ControlTokens | None:
        """None if text of a request may spell control tokens; `allowed`: None uses the engine's option. Cached by
        template, of which a model has one or two."""
        if template is None or (self.description.allow_control_tokens if allowed is None else allowed):
            return None
        controls = self._controls_of.get(template)
        if controls is None:
            controls = self._controls_of[template] = ControlTokens(self._need_tokenizer(), template)
        return controls

    def _check_generates(self) -> None:
        if (pooling := self.description.pooling) is not None and not pooling.generates:
            why = f" ({pooling.why_no_generation})" if pooling.why_no_generation else ""
            raise InvalidParams(
                f"{self.description.name} does not generate text{why}; it does {', '.join(pooling.tasks)}: "
                "use encode, or "
                "another model",
                param="model",
            )

    def _read(self, prompt: Prompt) -> tuple[str | None, list[int] | None]:
        """Returns the prompt's text and its token ids, each None if not given."""
        if isinstance(prompt, Mapping):
            for name, value in prompt.items():
                if name not in _PROMPT_FIELDS and not _is_empty(value):
                    hint = f"it takes {', '.join(_PROMPT_FIELDS)}"
                    raise InvalidPrompt(f"a prompt object has no {name!r:.100}; {hint}", param=str(name)[:100])
            if prompt.get("prompt_token_ids") is not None and not has_embeds(prompt):
                text = prompt.get("prompt")
                return text, self._checked_ids(prompt["prompt_token_ids"])
            if has_embeds(prompt):
                return prompt.get("prompt"), None
            if "prompt" not in prompt:
                raise InvalidPrompt(f"a prompt object has prompt or prompt_token_ids; this one has {sorted(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            self._need_tokenizer()
            return prompt, None
        if isinstance(prompt, Sequence | np.ndarray):
            return None, self._checked_ids(prompt)
        raise InvalidPrompt(f"a prompt is a string, a list of token ids or an object; this is {type(prompt).__name__}")

    def _checked_ids(self, ids: object) -> list[int]:
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        if isinstance(ids, str | bytes) or not hasattr(ids, "__iter__"):
            raise InvalidPrompt(f"prompt_token_ids is {type(ids).__name__}; give a list of token ids")
        try:
            return msgspec.convert(ids, self._ids_type)  # the fast path for a list of int
        except (msgspec.ValidationError, UnicodeEncodeError):
            pass  # numpy integers and similar, or an error that is found below
        checked = []
        for token in ids:
            if isinstance(token, bool) or not hasattr(token, "__index__"):
                raise InvalidPrompt(f"token id {token!r} is not an integer")
            token = token.__index__()
            if not 0 <= token < self.description.vocab_size:
                raise InvalidPrompt(f"token id {token} is out of vocabulary; {self.description.known_ids}")
            checked.append(token)
        return checked

    def _need_tokenizer(self, what: str = "text") -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidPrompt(
                f"the prompt is {what} and `skip_tokenizer_init=True` is set; give token ids or unset it"
            )
        return self.tokenizer


def _is_empty(value: object) -> bool:
    """Whether a field is as good as absent. Arrays cannot be compared."""
    return value is None or (isinstance(value, dict | list) and not value)


# ThinkingMarkers: the markers of a model's reasoning as token ids, for requests with a thinking budget.

MAX_TOKENS = 32  # of all markers of one kind
MAX_FORCED = 128  # of the text that is written when the budget is used
_HARMONY = ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",))  # the reasoning of gpt-oss is a message
_TAIL = 32  # last tokens of a prompt, in which the marker that begins reasoning is looked for


class ThinkingMarkers:
    """Markers from `reasoning_config`, else of the reasoning parser, else of the format of the chat template."""

    def __init__(self, tokenizer: Tokenizer, config: ReasoningConfig | None, parser: str | None = None) -> None:
        """`parser`: the name of a reasoning parser; None: by the chat template."""
        self._tokenizer = tokenizer
        known = reasoning_of(tokenizer.chat_template(), parser, tokenizer.settings)
        self._format = _HARMONY if isinstance(known, HarmonyFormat) else known
        forced = None if config is None else config.end
        if config is not None:
            ends: tuple[str, ...] = (config.end,)
            if self._format is not None and any(marker in config.end for marker in self._format.end):
                ends = self._format.end  # the model writes its own marker without the text around it
            self._format = ReasoningFormat((config.start,), ends)
        if self._format is not None:
            self._start, self._end = self._ids(self._format.begin), self._ids(self._format.end + self._format.stops)
            self._forced = self._end[0] if forced is None else self._ids((forced,), MAX_FORCED)[0]

    def of(self, prompt: list[int], params: SamplingParams) -> Thinking:
        """For a request with this prompt and these parameters, which have a budget."""
        if self._format is None:
            raise InvalidParams(
                "thinking_token_budget needs to know how the model marks its reasoning, which its chat template does "
                "not show; start the engine with reasoning_config, with reasoning_start_str and reasoning_end_str",
                param="thinking_token_budget",
            )
        is_open = self._format.is_open(self._tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False))
        structure = params.structured_outputs
        if is_open and structure is not None and structure.prefix is None:
            raise InvalidParams(
                "the prompt ends within reasoning, and the structured output begins with the first token, so there is "
                "no reasoning that thinking_token_budget could end; use the chat API, or remove one of them",
                param="thinking_token_budget",
            )
        return Thinking(self._start, self._end, self._forced, is_open)

    def _ids(self, markers: tuple[str, ...], limit: int = MAX_TOKENS) -> tuple[tuple[int, ...], ...]:
        ids = tuple(tuple(self._tokenizer.encode(marker, add_special_tokens=False)) for marker in markers)
        if not all(ids) or sum(map(len, ids)) > limit:
            raise InvalidOption(
                f"the markers {list(markers)} of reasoning have {[len(each) for each in ids]} tokens; give 1 to "
                f"{limit} in all"
            )
        return ids


def check_forced(thinking: Thinking, description: ModelDescription) -> None:
    """Raises if the device cannot write the end of the reasoning: a tokenizer may have more tokens than the model."""
    if (token := max(thinking.forced)) >= description.vocab_size:
        raise InvalidParams(
            f"thinking_token_budget would write token id {token}; {description.known_ids}, set another "
            "reasoning_end_str in reasoning_config",
            param="thinking_token_budget",
        )
