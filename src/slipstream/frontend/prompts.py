"""Prompts: those of one call, all checked at once, their texts encoded as they are needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

from slipstream.errors import InvalidPrompt, UserError
from slipstream.frontend.inputs import InputProcessor, Prepared, Prompt
from slipstream.frontend.lookahead import Lookahead
from slipstream.params import SamplingParams
from slipstream.text.guarded import plain

_PER_TOKEN = 4  # characters, about
_MOST = 2**19  # characters encoded at a time: a tokenizer notes much about each token


class Prompts:
    """Iterating gives what is to be sent, in the order of the prompts.

    Texts are encoded in parts, a step's worth first and then more and more, each while the one before is used.
    """

    def __init__(
        self,
        inputs: InputProcessor,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        new_id: Callable[[], str],
        *,
        priorities: Sequence[int | None] | None = None,
        salts: Sequence[str | None] | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self.asked: list[Prepared] = []  # in full where token ids were given
        each = zip(prompts, params, priorities or repeat(None), salts or repeat(None), strict=False)
        try:
            for prompt, own, priority, salt in each:
                self.asked.append(inputs.ask(new_id(), prompt, own, priority=priority, cache_salt=salt))
        except UserError as error:
            raise error.of_prompt(len(self.asked), len(prompts)) from None
        # whether none will be refused that has still to be encoded
        self.is_sure = all(
            message.prompt_token_ids or inputs.surely_fits(message, text or "") for message, text in self.asked
        )
        make = partial(_make, inputs, self.asked, add_special_tokens)  # not ours, or we would keep each other
        self._made = Lookahead(make, _parts(self.asked, _PER_TOKEN * inputs.facts.max_batch_tokens))

    def __iter__(self) -> Iterator[Prepared]:
        return self._made

    def is_ready(self) -> bool:
        """Whether the next one need not be waited for."""
        return self._made.is_ready()


def _make(inputs: InputProcessor, asked: Sequence[Prepared], special: bool, part: slice) -> list[Prepared]:
    to_read: list[str | None] = []  # None where token ids were given
    made: list[Prepared] = []
    try:
        for message, text in asked[part]:
            to_read.append(None if message.prompt_token_ids else inputs.to_read(message, text or ""))
    except UserError as error:
        raise error.of_prompt(part.start + len(to_read), len(asked)) from None
    texts = [text for text in to_read if text is not None]
    try:
        found = inputs.encode(texts, special) if texts else []
    except InvalidPrompt:
        found = []  # whose text it was shows when they are encoded one by one
    each = iter(found)
    try:
        for (message, text), read in zip(asked[part], to_read, strict=True):
            if read is not None:
                message = inputs.complete(message, next(each) if found else inputs.encode([read], special)[0])
            made.append((message, text and plain(text)))
    except UserError as error:
        raise error.of_prompt(part.start + len(made), len(asked)) from None
    return made


def _parts(asked: Sequence[Prepared], size: int) -> Iterator[slice]:
    """Of so many characters to be encoded, then of twice as many each time."""
    start = taken = 0
    size = min(size or _MOST, _MOST)
    for place, (message, text) in enumerate(asked):
        if taken >= size:
            yield slice(start, place)
            start, taken, size = place, 0, min(2 * size, _MOST)
        if not message.prompt_token_ids:
            taken += len(text or "")
    yield slice(start, len(asked))
