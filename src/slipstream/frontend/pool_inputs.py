"""PoolInputs: what is to be pooled becomes prompts that can be sent, or a clear exception."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slipstream.config.pooling_info import Role
from slipstream.frontend.lookahead import Lookahead
from slipstream.frontend.pool_params import settle_params
from slipstream.frontend.pool_prompts import Batch, PoolPrompt, Prepared, PromptReader, skipping
from slipstream.frontend.pool_words import join_pair, pair_words, prefix_of, role_of
from slipstream.pooling_params import PoolingParams, Task
from slipstream.text.control_tokens import ControlTokens

_FIRST, _MOST = 64, 1024  # prompts encoded at a time: few at first, so that the device has work at once
_MAX_IDS = 256  # where they are token ids already: no thread reads those ahead, so a step may wait for a part


class PoolInputs(PromptReader):
    """A reader of prompts that knows the model's own words."""

    _pair_controls: ControlTokens | None = None  # made when first needed

    def settle(self, params: PoolingParams | None, task: Task | None = None) -> PoolingParams:
        """Parameters whose task is named and which this model can honour."""
        return settle_params(params, task, self.pooling, self.facts)

    def prefix(self, prompt_name: str | None, prompt: str | None = None) -> str:
        """What stands before a text: given itself, by its name, or the model's own."""
        return prefix_of(self.pooling, self.facts.name, prompt_name, prompt)

    def after_prefix(self, params: PoolingParams, prefix: str) -> PoolingParams:
        """Of a text behind this prefix, whose tokens the model may leave out of its pooling."""
        if not prefix or self.pooling.include_prompt:
            return params
        return skipping(params, self.prefix_length(prefix))

    def role(self, prompt_name: str | None) -> Role:
        """What a text is to late interaction, by the name of its prompt."""
        return role_of(self.pooling, prompt_name)

    def pair_words(self, prompt_name: str | None, instruction: str | None) -> tuple[str, str | None]:
        """What stands before the first text of a pair, and the instruction for both."""
        return pair_words(self.pooling, self.facts.name, prompt_name, instruction)

    def pair(self, query: str, document: str, instruction: str | None) -> PoolPrompt:
        """Two texts as one prompt, in the way the model was trained."""
        return join_pair(self.pooling, self.facts.name, query, document, instruction, self._controls())

    def _controls(self) -> ControlTokens | None:
        """Control tokens that the template of pairs may write and the texts of a pair may not; None: all may."""
        template = self.pooling.pair_template
        if self.tokenizer is None or template is None or self.facts.allow_control_tokens:
            return None
        if self._pair_controls is None:
            self._pair_controls = ControlTokens(self.tokenizer, template)
        return self._pair_controls

    def prepare(self, batches: Sequence[Batch]) -> Lookahead[tuple[Batch, slice], Prepared]:
        """The prompts of one batch after another, some at a time, the shorter of them first."""
        encodes = sum(len(batch.prompts) for batch in batches) > _FIRST and any(
            isinstance(batch.prompts[0], str | tuple | Mapping) for batch in batches
        )
        parts = []
        for batch in batches:
            start, size = 0, _FIRST
            while start < len(batch.prompts):
                parts.append((batch, slice(start, start + size)))
                start, size = start + size, min(2 * size, _MOST if encodes else _MAX_IDS)
        return Lookahead(self._make, parts, beside=encodes)

    def _make(self, part: tuple[Batch, slice]) -> list[Prepared]:
        # equal lengths side by side are computed together where the device likes that
        return sorted(self.read(*part), key=_length)


def _length(one: Prepared) -> int:
    return len(one.ids)
