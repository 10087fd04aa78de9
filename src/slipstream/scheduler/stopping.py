"""Stop rules on token ids. Stop strings belong to the text side, which sends an abort."""

from __future__ import annotations

from slipstream.request import FinishReason, Request

Ending = tuple[FinishReason | None, int | None]
"""Why it ended, if it did, and the token that ended it, if one did."""


def check_stop(request: Request, token: int) -> Ending:
    """Whether `token`, just appended, is the request's last.

    A stop token goes before the length: it ends the text even where the length would have, too.
    """
    if token in request.stop_ids and request.num_output >= request.params.min_tokens:
        return FinishReason.STOP, token
    if len(request.tokens) >= request.max_length:
        return FinishReason.LENGTH, None
    return None, None
