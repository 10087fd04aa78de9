"""HeldRequests: requests that plans leave out until a background thread has filled their mask."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from slipstream.config.buffer_size import mask_words
from slipstream.contracts.request import Request, Status
from slipstream.contracts.step import SitOut
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.session import Session


class HeldRequests:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._num_words = mask_words(grammars.vocab_size)
        self._requests: list[Request] = []

    def __bool__(self) -> bool:
        return bool(self._requests)

    def wait_for_late(self, request: Request) -> None:
        """The mask of this request is late: leave it out of plans until it is filled."""
        if request.status is Status.RUNNING:
            request.hold()
            if request not in self._requests:
                self._requests.append(request)

    def fill(self, request: Request, session: Session, budget: float) -> None:
        """Fill the mask of a slow session in the background. `budget`: seconds that masks may take."""
        mask = np.zeros(self._num_words, np.uint32)

        def fill() -> None:
            start = time.perf_counter()
            session.fill(mask)
            session.ready = mask
            session.is_slow = time.perf_counter() - start > budget / 2

        session.job = self._grammars.run(fill)
        self._requests.append(request)

    def wake(self) -> list[Request]:
        """The requests whose masks are filled now."""
        woken = []
        for request in self._requests[:]:
            session = request.session
            assert session is not None
            if session.is_busy and request.status is Status.RUNNING:
                continue
            self._requests.remove(request)
            if request.status is not Status.FINISHED and not session.is_busy:
                woken.append(request)
        return woken


def sit_out(rows: list[int], requests: Sequence[Request]) -> SitOut:
    """The rows of these requests, and the state in which the device computes their last position again."""
    return SitOut(
        np.array(rows, np.int32),
        np.array([len(request.tokens) - 1 for request in requests], np.int32),
        np.array([request.tokens[-1] for request in requests], np.int32),
    )
