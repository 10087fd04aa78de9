"""Tokens and results of the scripted device: pure functions of a request's history."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slipstream.contracts.request import NEVER, FinishReason, Request

VOCAB = 97
IMAGE = 1 << 20  # the token of images; those of texts are far below
_SHOWN = 1 << 40  # what the device reads there instead: from here on


def shown(patches: np.ndarray[Any, Any], row: int) -> int:
    """What the tower makes of an image for one of its tokens."""
    return _SHOWN + hash((patches.tobytes(), row)) % _SHOWN


def as_token(content: int) -> int:
    return IMAGE if content >= _SHOWN else content


def seen_prompt(request: Request) -> list[int]:
    """The prompt as the device reads it, with images."""
    tokens = list(request.tokens[: request.num_prompt])
    if request.images is not None:
        for span in request.images.spans:
            patches = request.images.images[span.image].patches
            tokens[span.start : span.stop] = [shown(patches, span.first_row + k) for k in range(span.count)]
    return tokens


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
    tokens = seen_prompt(request)
    while True:
        token = draw(tokens[-horizon:], request.seed, request.sample)
        tokens.append(token)
        count = len(tokens) - request.num_prompt
        if token in request.stop_ids and count >= request.params.min_tokens:
            return tokens[request.num_prompt :], FinishReason.STOP
        if len(tokens) >= request.max_length:
            return tokens[request.num_prompt :], FinishReason.LENGTH
