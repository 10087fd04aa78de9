"""PoolInputs: what is to be pooled becomes prompts that can be sent, or a clear exception."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from slipstream.config.pooling_info import Role
from slipstream.engine.front.ahead import Ahead
from slipstream.engine.front.facts import ModelFacts
from slipstream.engine.front.pool_params import settle_params
from slipstream.engine.front.pool_prompts import PoolPrompt, Prepared, PromptReader
from slipstream.engine.front.pool_words import PLAIN, join_pair, prefix_of, role_of
from slipstream.pooling_params import PoolingParams, Task
from slipstream.text.tokenizer import Tokenizer

_FIRST, _MOST = 64, 1024  # prompts encoded at a time: few at first, so that the device has work at once
_MOST_IDS = 256  # where they are token ids already: no thread reads those ahead, so a step may wait for a part


class PoolInputs:
    def __init__(self, facts: ModelFacts, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self.model_name = facts.name
        self._max_model_len = facts.max_model_len
        self._reader = PromptReader(facts, tokenizer)
        self.pooling = self._reader.pooling

    def settle(self, params: PoolingParams | None, task: Task | None = None) -> PoolingParams:
        """Parameters whose task is named and which this model can honour."""
        return settle_params(params, task, self.pooling, self._max_model_len, self.model_name)

    def prefix(self, prompt_name: str | None, prompt: str | None = None) -> str:
        """What stands before a text: given itself, by its name, or the model's own."""
        return prefix_of(self.pooling, self.model_name, prompt_name, prompt)

    def role(self, prompt_name: str | None) -> Role:
        """What a text is to late interaction, by the name of its prompt."""
        return role_of(self.pooling, prompt_name)

    def pair(self, query: str, document: str, instruction: str | None) -> PoolPrompt:
        """Two texts as one prompt, in the way the model was trained."""
        return join_pair(self.pooling, self.model_name, query, document, instruction)

    def text_ids(self, text: str, params: PoolingParams, prefix: str = "") -> list[int]:
        """Of one text. The same ids as `prepare` gives, for those to whom a request is one text and time counts."""
        return self._reader.text_ids(text, params, prefix)

    def prepare(
        self,
        prompts: Sequence[PoolPrompt],
        params: PoolingParams | Sequence[PoolingParams],
        *,
        prefix: str = "",
        role: Role = PLAIN,
    ) -> Iterator[Prepared]:
        """The prompts, some at a time, the shorter of them first. `params` are settled; one for all or one each.

        `prefix` is put before texts, `role` is what late interaction makes of them; token ids are taken as they are.
        """
        encodes = len(prompts) > _FIRST and isinstance(prompts[0], str | tuple | Mapping)
        parts, start, size = [], 0, _FIRST
        while start < len(prompts):
            parts.append(slice(start, start + size))
            start, size = start + size, min(2 * size, _MOST if encodes else _MOST_IDS)

        def make(part: slice) -> list[Prepared]:
            chunk = prompts[part]
            each = [params] * len(chunk) if isinstance(params, PoolingParams) else params[part]
            prepared = self._reader.read(chunk, each, part.start, len(prompts), prefix, role)
            # equal lengths side by side are computed together where the device likes that
            prepared.sort(key=_length)
            return prepared

        if encodes:
            return Ahead(make, parts)
        return (one for part in parts for one in make(part))


def _length(one: Prepared) -> int:
    return len(one.ids)
