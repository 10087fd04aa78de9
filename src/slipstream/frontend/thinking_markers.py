"""ThinkingMarkers: the markers of a model's reasoning as token ids, for requests with a thinking budget."""

from __future__ import annotations

from slipstream.base.errors import InvalidOption, InvalidParams
from slipstream.checkpoint.generation import ReasoningConfig
from slipstream.engine.model_description import ModelDescription
from slipstream.params.sampling import SamplingParams
from slipstream.params.thinking import Thinking
from slipstream.parsers.families import NO_PARSER, detect_reasoning, reasoning_format
from slipstream.parsers.output_parser import HarmonyFormat, ReasoningFormat
from slipstream.text.tokenizer import Tokenizer

MAX_TOKENS = 32  # of all markers of one kind
MAX_FORCED = 128  # of the text that is written when the budget is used
_HARMONY = ReasoningFormat(("<|channel|>analysis<|message|>",), ("<|end|>",))  # the reasoning of gpt-oss is a message
_TAIL = 32  # last tokens of a prompt, in which the marker that begins reasoning is looked for


class ThinkingMarkers:
    """Markers from `reasoning_config`, else of the reasoning parser, else of the format of the chat template."""

    def __init__(self, tokenizer: Tokenizer, config: ReasoningConfig | None, parser: str | None = None) -> None:
        """`parser`: the name of a reasoning parser; None: by the chat template."""
        self._tokenizer = tokenizer
        name = parser or detect_reasoning(tokenizer.chat_template())
        known = None if name in (None, NO_PARSER) else reasoning_format(name)
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
