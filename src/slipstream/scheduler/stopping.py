"""Stop rules on token ids. The front end checks stop strings and aborts the request."""

from __future__ import annotations

from slipstream.contracts.request import FinishReason, Request

Ending = tuple[int, FinishReason | None, int | None]
"""How many of the new tokens are output, why the request ended (None: it goes on), the stop token that ended it."""


def check_stop(request: Request, num_new: int) -> Ending:
    """Whether one of the `num_new` tokens just appended is the last of the request.

    A stop token goes before the length: it ends the text even where the length would have, too.
    """
    tokens, first = request.tokens, len(request.tokens) - num_new
    for index in range(first, len(tokens)):
        token, length = tokens[index], index + 1
        if token in request.stop_ids and length - request.num_prompt >= request.params.min_tokens:
            return length - first, FinishReason.STOP, token
        if length >= request.max_length:
            return length - first, FinishReason.LENGTH, None
    return num_new, None, None
