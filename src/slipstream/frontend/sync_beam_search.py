"""Beam search by calls of an engine in the caller's thread: each call generates one token for every beam.

The HTTP routes have the same search over requests that run at once (`serve/http/openai/beam.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from slipstream.frontend.beam_grammar import BeamGrammar, BeamStep
from slipstream.frontend.beam_search import BeamSearch
from slipstream.frontend.results import Logprob, RequestOutput
from slipstream.params.sampling import SamplingParams


class Generate(Protocol):
    def __call__(
        self, prompts: Sequence[list[int]], sampling_params: SamplingParams | Sequence[SamplingParams]
    ) -> list[RequestOutput]: ...


def search_to_the_end(
    searches: Sequence[BeamSearch],
    step: SamplingParams,
    grammar: BeamGrammar | None,
    generate: Generate,
    advance: Callable[[int], object],
) -> None:
    """Runs searches side by side until all are finished. `step`: parameters of a call; `advance` gets the number of
    beams after each call."""
    while beams := [beam.tokens for search in searches for beam in search.beams]:
        steps = [BeamStep(step)] * len(beams)
        if grammar is not None:
            starts = [search.num_prompt for search in searches for _ in search.beams]
            steps = grammar.steps(step, beams, starts)
        entries = [
            own.kept(_entries(output))
            for own, output in zip(steps, generate(beams, [own.params for own in steps]), strict=True)
        ]
        for index, own in enumerate(steps):
            if not entries[index]:
                (output,) = generate([beams[index]], own.again())
                entries[index] = own.kept(_entries(output))
        rest = iter(entries)
        for search in searches:
            search.take([next(rest) for _ in search.beams])
        advance(len(beams))


def _entries(output: RequestOutput) -> Mapping[int, Logprob]:
    """The likeliest tokens of a request for one token."""
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None, "a step of a beam search asks for logprobs"
    return logprobs[0]
