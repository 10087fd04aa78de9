"""BeamGrammar: the tokens that a grammar allows after the tokens of a beam, for structured output with beam search.

A beam's request has no state of a grammar, because its generated tokens are part of its prompt. So the front end
follows the grammar of each beam and chooses among the tokens that it allows.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from slipstream.base.errors import InvalidParams
from slipstream.config.buffer_size import mask_words
from slipstream.frontend.beam_search import BeamSearchParams
from slipstream.frontend.results import Logprob
from slipstream.frontend.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.session import CompiledGrammar, Session

MAX_REPORTED = 1024
"""Up to so many allowed tokens, a request reports the logprobs of all of them."""


class BeamGrammars:
    """Compiles the grammars of a front end's beam searches. The core of a model may be in another process."""

    def __init__(self) -> None:
        self._by_model: dict[str, Grammars] = {}
        self._lock = threading.Lock()

    def compile(self, served: ServedModel, params: BeamSearchParams) -> BeamGrammar | None:
        """Waits for the compilation; None: the search has no grammar."""
        if params.structured_outputs is None:
            return None
        compilation = self.of(served).compile(_shape(served, params))
        return BeamGrammar(compilation.result(), *_vocabulary(served, params))

    async def open(self, served: ServedModel, params: BeamSearchParams, caller: str) -> BeamGrammar:
        """As `compile`, for a search with a grammar, without occupying a thread; `caller` takes its turn."""
        grammars = self.of(served)
        compilation = grammars.compile(_shape(served, params), caller)
        try:
            compiled = await asyncio.wrap_future(compilation)
        finally:
            grammars.leave(compilation, caller)
        return BeamGrammar(compiled, *_vocabulary(served, params))

    def of(self, served: ServedModel) -> Grammars:
        with self._lock:
            grammars = self._by_model.get(served.base_name)
            if grammars is None:
                grammars = Grammars(lambda: served.tokenizer, served.description.vocab_size)
                self._by_model[served.base_name] = grammars
            return grammars

    def close(self) -> None:
        for grammars in self._by_model.values():
            grammars.close()


def _shape(served: ServedModel, params: BeamSearchParams) -> StructuredOutputsParams:
    wanted = SamplingParams(structured_outputs=params.structured_outputs)
    if (config := served.inputs.checks.structured_config) is not None:
        wanted = config.with_defaults(wanted)
    assert isinstance(wanted.structured_outputs, StructuredOutputsParams), "the search has a grammar"
    return wanted.structured_outputs


def _vocabulary(served: ServedModel, params: BeamSearchParams) -> tuple[int, Sequence[int]]:
    """Its size, and the tokens that end a sequence."""
    return served.description.vocab_size, () if params.ignore_eos else served.description.eos_token_ids


class BeamGrammar:
    def __init__(self, compiled: CompiledGrammar, vocab_size: int, end_ids: Sequence[int]) -> None:
        """`end_ids`: tokens that end a sequence, allowed where the structure is complete."""
        if not end_ids:
            raise InvalidParams(
                "structured_outputs with beam search need an end token, and the model has none or ignore_eos is set; "
                "leave ignore_eos out, or generate without beams",
                param="structured_outputs",
            )
        self._end_ids = list(end_ids)
        self._vocab_size = vocab_size
        self._compiled = compiled

    def steps(self, step: SamplingParams, beams: Sequence[Sequence[int]], num_prompts: Sequence[int]) -> list[BeamStep]:
        """The step of each beam. `num_prompts`: tokens of the prompt, with which a beam begins."""
        return [self.step(step, beam[start:]) for beam, start in zip(beams, num_prompts, strict=True)]

    def step(self, step: SamplingParams, generated: Sequence[int]) -> BeamStep:
        """The step that extends a beam with these generated tokens."""
        allowed = self._allowed_after(generated)
        count = int(allowed.sum())
        if not count:
            raise InvalidParams(
                "structured_outputs: the grammar allows no token after those of a beam; change it, or generate without "
                "beams",
                param="structured_outputs",
            )
        if count > MAX_REPORTED:
            return BeamStep(step, np.packbits(allowed))
        ids = np.flatnonzero(allowed).tolist()
        return BeamStep(step.with_changes(allowed_token_ids=ids, logprob_token_ids=ids), np.packbits(allowed))

    def _allowed_after(self, generated: Sequence[int]) -> np.ndarray:
        """[vocab_size] of 0 and 1."""
        session = Session(self._compiled, list(generated), 0, self._end_ids, self._vocab_size)
        mask = np.zeros(mask_words(self._vocab_size), np.uint32)
        ids: Sequence[int] = ()
        try:
            session.catch_up()
            if session.is_complete:
                ids = self._end_ids
            elif session.forced:
                ids = session.forced[:1]
            else:
                session.fill(mask)
        finally:
            session.close()
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: self._vocab_size]
        allowed[list(ids)] = 1
        return allowed


class BeamStep(NamedTuple):
    """One step of a beam: the parameters of its request, and the tokens that a grammar allows.

    A request reports the logprobs of all allowed tokens if these are few. If they are many, which would be megabytes
    for each beam, it reports the likeliest tokens of the vocabulary, and `kept` drops the others. Where that leaves
    none, the request is sent `again`, with all allowed tokens, and draws the likeliest of them.
    """

    params: SamplingParams
    allowed: np.ndarray | None = None  # bits, as of np.packbits; None: all tokens

    def kept(self, entries: Mapping[int, Logprob]) -> Mapping[int, Logprob]:
        """The entries of allowed tokens."""
        if self.allowed is None:
            return entries
        bits = self.allowed
        return {token: entry for token, entry in entries.items() if bits[token >> 3] >> (7 - (token & 7)) & 1}

    def again(self) -> SamplingParams:
        assert self.allowed is not None, "without a grammar all entries are kept"
        return self.params.with_changes(allowed_token_ids=np.flatnonzero(np.unpackbits(self.allowed)).tolist())
