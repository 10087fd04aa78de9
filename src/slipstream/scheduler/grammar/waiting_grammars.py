"""WaitingGrammars: requests that wait until their grammar is compiled in the background."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.contracts.request import Request, Status
from slipstream.scheduler.grammar.compiled import CompiledGrammar
from slipstream.scheduler.grammar.grammars import Compilation, Grammars


class WaitingGrammars:
    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._waiting: dict[str, tuple[Sequence[Request], Compilation]] = {}  # by request id, all samples

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def compile(self, requests: Sequence[Request]) -> CompiledGrammar | None:
        """The grammar of these samples; None: they wait for it. Raises if it is known to be wrong."""
        leader = requests[0]
        spec = leader.params.structured_outputs
        assert spec is not None
        compilation = self._grammars.compile(spec, leader.caller)
        if compilation.done():
            return compilation.result()
        self._waiting[leader.id] = requests, compilation
        return None

    def leave(self, request: Request) -> None:
        """A sample has ended. After the last one its request waits no more."""
        if (waiting := self._waiting.get(request.id)) is not None and not _live(waiting[0]):
            del self._waiting[request.id]
            self._grammars.leave(waiting[1], request.caller)

    def take(self) -> Iterator[tuple[list[Request], CompiledGrammar | Exception]]:
        """Samples whose grammar is compiled, or is wrong."""
        for name, (requests, compilation) in list(self._waiting.items()):
            if compilation.done():
                del self._waiting[name]
                error = compilation.exception()
                if error is not None and not isinstance(error, Exception):
                    raise error
                yield _live(requests), compilation.result() if error is None else error


def _live(requests: Sequence[Request]) -> list[Request]:
    return [request for request in requests if request.status is not Status.FINISHED]
