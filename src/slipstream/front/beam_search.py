"""Beam search over single steps of the engine: every step generates one token for each beam, with its likeliest tokens.

The engine knows nothing of it: a beam is a prompt of token ids, of which the prefix cache has all but the last. With
vLLM's names and rules: every end token among the likeliest tokens of a beam completes a sequence, and the search lasts
`max_tokens` steps. Scores are divided by the number of generated tokens to the power of `length_penalty`.
"""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from slipstream.base.errors import InvalidParams, PromptTooLong
from slipstream.config.buffer_size import mask_words
from slipstream.engine.model_description import ModelDescription
from slipstream.front.results import Logprob
from slipstream.front.served import ServedModel
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.params.values import CheckedNames, check_integer
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.session import CompiledGrammar, Session

T = TypeVar("T")

MAX_WIDTH = 128


class BeamSearchParams(msgspec.Struct, frozen=True, metaclass=CheckedNames):
    beam_width: int
    """Number of beams, and of sequences in the result."""
    max_tokens: int
    """Maximum number of generated tokens."""
    ignore_eos: bool = False
    """End tokens do not complete a sequence."""
    temperature: float = 0.0
    """Only 0: beams are ranked by the model's own probabilities."""
    length_penalty: float = 1.0
    """Exponent of the length in scores: over 0 favours longer sequences."""
    include_stop_str_in_output: bool = False
    """Keep the end token of a complete sequence."""
    structured_outputs: StructuredOutputsParams | None = None
    """The structure of every sequence that ends before `max_tokens`."""

    def __post_init__(self) -> None:
        check_integer("beam_width", self.beam_width, 1, MAX_WIDTH)
        check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        msgspec.structs.force_setattr(self, "structured_outputs", as_params(self.structured_outputs))
        if self.temperature != 0:
            fact = f"temperature is {self.temperature!r}; beam search ranks by the model's own probabilities"
            raise InvalidParams(f"{fact}, remove it", param="temperature")
        if isinstance(self.length_penalty, bool) or not isinstance(self.length_penalty, int | float):
            raise InvalidParams(f"length_penalty is {self.length_penalty!r}; give a number", param="length_penalty")
        if not -100 <= self.length_penalty <= 100:
            raise InvalidParams(f"length_penalty is {self.length_penalty}; give -100 to 100", param="length_penalty")

    def of_step(self, model: ModelDescription) -> SamplingParams:
        """Parameters of the request that extends one beam."""
        if model.logprobs_mode.endswith("logits"):
            fact = f"beam search ranks by logprobs, and logprobs_mode of {model.name} is {model.logprobs_mode}"
            raise InvalidParams(f"{fact}; start the engine with raw_logprobs, the default")
        num = min(2 * self.beam_width, model.vocab_size)
        return SamplingParams(max_tokens=1, temperature=0.0, logprobs=num, ignore_eos=True, detokenize=False)


class BeamSearchSequence(msgspec.Struct):
    tokens: list[int]  # prompt and output
    cum_logprob: float = 0.0
    text: str | None = None  # of all tokens
    finish_reason: str | None = None  # stop or length
    num_generated: int = 0  # tokens, with an end token that is not shown


class BeamSearchOutput(msgspec.Struct):
    """The sequences of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


class BeamSearch:
    """The search for one prompt. `beams` are the sequences to extend by one token each; `take` gets their tokens."""

    def __init__(self, prompt: Sequence[int], params: BeamSearchParams, model: ModelDescription) -> None:
        self.params = params
        self._ends = frozenset(() if params.ignore_eos else model.eos_token_ids)
        self.num_prompt = len(prompt)
        self.beams = [BeamSearchSequence(list(prompt))]
        self._complete: list[BeamSearchSequence] = []
        self._num_steps = 0
        if len(prompt) + params.max_tokens > (limit := model.max_model_len):
            raise PromptTooLong(
                f"the prompt has {len(prompt)} tokens and max_tokens is {params.max_tokens}; {model.name} takes "
                f"{limit}: lower max_tokens or shorten the prompt"
            )

    def take(self, likeliest: Sequence[Mapping[int, Logprob]]) -> None:
        """Extends the beams. `likeliest`: the likeliest next tokens of each beam."""
        self._num_steps += 1
        grown: list[tuple[float, BeamSearchSequence, int]] = []  # candidates, without their lists of tokens
        for beam, entries in zip(self.beams, likeliest, strict=True):
            for token, entry in entries.items():
                logprob = beam.cum_logprob + entry.logprob
                if token in self._ends:
                    tokens = [*beam.tokens, token] if self.params.include_stop_str_in_output else beam.tokens
                    ended = BeamSearchSequence(tokens, logprob, None, "stop", beam.num_generated + 1)
                    self._complete.append(ended)
                else:
                    grown.append((logprob, beam, token))
        best = heapq.nlargest(self.params.beam_width, grown, key=itemgetter(0))  # all have one length
        self.beams = [
            BeamSearchSequence([*beam.tokens, token], logprob, num_generated=beam.num_generated + 1)
            for logprob, beam, token in best
        ]
        self._complete = self._best(self._complete)
        if self._num_steps == self.params.max_tokens or not self.beams:
            for beam in self.beams:
                beam.finish_reason = "length"
            self._complete, self.beams = self._best(self._complete + self.beams), []

    def result(self) -> list[BeamSearchSequence]:
        assert not self.beams, "the search is not finished"
        return self._complete

    def _best(self, sequences: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(sequences, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, sequence: BeamSearchSequence) -> float:
        score: float = sequence.cum_logprob / sequence.num_generated**self.params.length_penalty
        return score


# BeamGrammar: the tokens that a grammar allows after the tokens of a beam, for structured output with beam search.
#
# A beam's request has no state of a grammar, because its generated tokens are part of its prompt. So the front end
# follows the grammar of each beam and chooses among the tokens that it allows.

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


# The search itself, over requests of one token for every beam: of `LLM`, or of an HTTP route.

Entries = Mapping[int, Logprob]
"""The likeliest tokens of a request for one token."""
Generate = Callable[[Sequence[list[int]], Sequence[SamplingParams]], Awaitable[Sequence[Entries]]]


async def _at_once(function: Callable[[], T]) -> T:
    return function()


async def search_to_the_end(
    searches: Sequence[BeamSearch],
    step: SamplingParams,
    grammar: BeamGrammar | None,
    generate: Generate,
    *,
    advance: Callable[[int], object] = lambda num_beams: None,
    run: Callable[[Callable[[], list[BeamStep]]], Awaitable[list[BeamStep]]] = _at_once,
) -> None:
    """Runs searches side by side until all are finished. `step`: parameters of a request; `advance` gets the number of
    beams after each step; `run` calls a function of the grammar, which takes milliseconds with many beams."""
    while beams := [beam.tokens for search in searches for beam in search.beams]:
        steps = [BeamStep(step)] * len(beams)
        if grammar is not None:
            starts = [search.num_prompt for search in searches for _ in search.beams]
            steps = await run(partial(grammar.steps, step, beams, starts))
        found = await generate(beams, [own.params for own in steps])
        entries = [own.kept(each) for own, each in zip(steps, found, strict=True)]
        for index, own in enumerate(steps):
            if not entries[index]:
                entries[index] = own.kept(*await generate([beams[index]], [own.again()]))
        rest = iter(entries)
        for search in searches:
            search.take([next(rest) for _ in search.beams])
            await asyncio.sleep(0)  # with many beams a step takes milliseconds: other requests come first
        advance(len(beams))
