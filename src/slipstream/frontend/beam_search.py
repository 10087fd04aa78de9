"""Beam search over single steps of the engine: every step generates one token for each beam, with its likeliest tokens.

The engine knows nothing of it: a beam is a prompt of token ids, of which the prefix cache has all but the last. With
vLLM's names and rules: every end token among the likeliest tokens of a beam completes a sequence, and the search lasts
`max_tokens` steps. Scores are divided by the number of generated tokens to the power of `length_penalty`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from operator import itemgetter

import msgspec

from slipstream.base.errors import InvalidParams, PromptTooLong
from slipstream.engine.model_description import ModelDescription
from slipstream.frontend.results import Logprob
from slipstream.params.sampling import SamplingParams
from slipstream.params.structured import StructuredOutputsParams, as_params
from slipstream.params.values import CheckedNames, check_integer

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
