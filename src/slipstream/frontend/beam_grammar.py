"""BeamGrammar: the tokens that a grammar allows after the tokens of a beam, for structured output with beam search.

A beam's request has no state of a grammar, because its generated tokens are part of its prompt. So the front end
follows the grammar of each beam and gives the request its allowed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from slipstream.config.buffer_size import mask_words
from slipstream.errors import InvalidParams
from slipstream.frontend.results import Logprob
from slipstream.params import SamplingParams
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.session import Session
from slipstream.structured_params import StructuredOutputsParams

MAX_REPORTED = 1024
"""Up to so many allowed tokens, a request reports the logprobs of all of them."""


class BeamGrammar:
    def __init__(self, grammars: Grammars, params: StructuredOutputsParams, end_ids: Sequence[int]) -> None:
        """`end_ids`: tokens that end a sequence, allowed where the structure is complete."""
        if not end_ids:
            raise InvalidParams(
                "structured_outputs with beam search need an end token, and the model has none or ignore_eos is set; "
                "leave ignore_eos out, or use generate",
                param="structured_outputs",
            )
        self._end_ids = list(end_ids)
        self._vocab_size = grammars.vocab_size
        self._compiled = grammars.compile(params).result()

    def allowed_after(self, generated: Sequence[int]) -> list[int]:
        """Token ids, ascending."""
        session = Session(self._compiled, list(generated), 0, self._end_ids, self._vocab_size)
        try:
            session.catch_up()
            if session.is_complete:
                return self._end_ids
            if session.forced:
                return [session.forced[0]]
            mask = np.zeros(mask_words(self._vocab_size), np.uint32)
            session.fill(mask)
        finally:
            session.close()
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        return [int(token) for token in np.flatnonzero(bits)]

    def step(self, step: SamplingParams, generated: Sequence[int]) -> SamplingParams:
        """The parameters of the request that extends a beam with these generated tokens.

        Its token is the likeliest allowed one. Of a small set it reports all logprobs; of a large one, the likeliest
        tokens of the vocabulary, of which `allowed_entries` keeps those that are allowed.
        """
        allowed = self.allowed_after(generated)
        if not allowed:
            raise InvalidParams(
                "structured_outputs: the grammar allows no token after those of a beam; change it, or use generate",
                param="structured_outputs",
            )
        reported = allowed if len(allowed) <= MAX_REPORTED else None
        return step.with_changes(allowed_token_ids=allowed, logprob_token_ids=reported)


def allowed_entries(step: SamplingParams, entries: Mapping[int, Logprob]) -> Mapping[int, Logprob]:
    """The entries of tokens that a request's parameters allow; all, without a grammar."""
    if step.allowed_token_ids is None:
        return entries
    allowed = frozenset(step.allowed_token_ids)
    return {token: entry for token, entry in entries.items() if token in allowed}
