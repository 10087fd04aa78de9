"""WaitingGrammars: requests that wait until their grammar is compiled in the background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from slipstream.request import Request, Status
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.scheduler.grammar.grammars import Grammars


class WaitingGrammars:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: list[tuple[Sequence[Request], Future[CompiledGrammar]]] = []  # samples of one request

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def compile(self, requests: Sequence[Request]) -> CompiledGrammar | None:
        """The grammar of these samples; None: they wait for it. Raises if it is known to be wrong."""
        spec = requests[0].params.structured_outputs
        assert spec is not None
        future = self._grammars.compile(spec)
        if future.done():
            return future.result()
        self._waiting.append((requests, future))
        return None

    def take(self) -> Iterator[tuple[list[Request], CompiledGrammar | Exception]]:
        """Samples whose grammar is compiled, or is wrong."""
        waiting, self._waiting = self._waiting, []
        for requests, future in waiting:
            if not future.done():
                self._waiting.append((requests, future))
                continue
            live = [request for request in requests if request.status is not Status.FINISHED]
            if not live:
                continue  # aborted meanwhile; `close` may have cancelled the future
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            yield live, future.result() if error is None else error
