"""Tokens and results of the scripted device: pure functions of a request's history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from slipstream.contracts.request import NEVER, FinishReason, Request

VOCAB = 97


def draw(tokens: Sequence[int], seed: int, sample: int) -> int:
    """The next token of this history."""
    return hash((seed, sample, *tokens)) % VOCAB


def choose(wanted: int, allowed: Callable[[int], bool]) -> int | None:
    """The first allowed token from the wanted one on; None if there is none."""
    return next((token for step in range(VOCAB) if allowed(token := (wanted + step) % VOCAB)), None)


def pooled(tokens: Sequence[int]) -> float:
    """The pooled result of this prompt."""
    return float(draw(tokens, -1, -1))


def horizon(windows: Sequence[int]) -> int:
    """How many positions back a token depends on."""
    return NEVER if 0 in windows else max(windows, default=NEVER)


def alone(request: Request, horizon: int = NEVER) -> tuple[list[int], FinishReason]:
    """The result of this request on an engine of its own."""
    tokens = list(request.tokens[: request.num_prompt])
    while True:
        token = draw(tokens[-horizon:], request.seed, request.sample)
        tokens.append(token)
        count = len(tokens) - request.num_prompt
        if token in request.stop_ids and count >= request.params.min_tokens:
            return tokens[request.num_prompt :], FinishReason.STOP
        if len(tokens) >= request.max_length:
            return tokens[request.num_prompt :], FinishReason.LENGTH
