"""LockstepExecutor: launches the steps of an engine together with those of the engines that share its experts.

The sizes of a plan are posted when the plan arrives (`ranks/lockstep.py`). The plan is launched when the sizes of
all other engines for the same step are there: at the next call that finds them, at the latest when the next plan
arrives or the core waits for the result. Steps that were launched before run on the device meanwhile, so in steady
state the host waits for the device only. An engine without a plan launches a padding step for each step of the others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import select
import socket
import struct
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from slipstream.base.errors import EngineDead
from slipstream.config.config import EngineConfig
from slipstream.contracts.step import (
    NO_INTS,
    NO_PAGES,
    DrawBias,
    DrawEdits,
    Executor,
    Handle,
    Point,
    StepInterval,
    StepPlan,
    StepResult,
    StepSizes,
)
from slipstream.device.collectives import Group
from slipstream.ranks.link import RankWatch, accept_ranks, join_rank, wait_for_step
from slipstream.runner.runner import ModelRunner

_POLL_SECONDS = 0.001  # while the host waits for the device and sizes of the next step are missing


class SizedRunner(Executor, Protocol):
    """The part of ModelRunner that a LockstepExecutor uses."""

    def sizes_of(self, plan: StepPlan) -> StepSizes: ...


class LockstepExecutor:
    def __init__(
        self, runner: SizedRunner, exchange: StepExchange, num_groups: int, group: Group | None = None
    ) -> None:
        """`num_groups`: cache groups of a plan. `group`: its collectives are ended when an engine ends."""
        self.runner = runner
        self.exchange = exchange
        self.group = group
        self.is_broken = False  # set by the thread that waits for the end of another engine
        self._watch = RankWatch(exchange.files, self._break)
        self._last: Handle | None = None  # the newest step that was launched
        self.num_padding_steps = 0
        self._padding = padding_plan(num_groups)
        self._next: LockstepHandle | None = None  # posted; launched and finished by `advance`

    # Of the core

    def launch(self, plan: StepPlan) -> None:
        self._post(plan)

    def finish(self, late: DrawEdits | None = None) -> LockstepHandle:
        handle = self._next
        assert handle is not None, "finish comes after launch"
        handle.late_data, handle.is_ready = late, True
        self.advance()
        if handle.step is None and late is not None:
            handle.late_data = _copied(late)
        return handle

    def free_queries(self, queries: tuple[int, ...]) -> None:
        self.runner.free_queries(queries)

    def close(self) -> None:
        wait_for_step(self._last)
        self._watch.stop()
        self.exchange.leave()
        if self.group is not None:
            self.group.abort()
        self.runner.close()

    def check(self) -> None:
        """Raises EngineDead if an engine has ended: results that it did not take part in are wrong."""
        if self.is_broken:
            self.exchange.check()

    def _break(self) -> None:
        self.is_broken = True
        if self.group is not None:
            self.group.abort()

    # Of an engine that has nothing to launch

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when `is_waited_for` may have become true."""
        return self.exchange.files

    def is_waited_for(self) -> bool:
        """Whether `follow` has something to do."""
        return self.exchange.is_behind() or (self._next is not None and self.exchange.has_all())

    def follow(self) -> None:
        """Takes part in the next step of the other engines, if they have posted one, with a padding step."""
        self.advance()
        if self.exchange.is_behind():
            self._post(self._padding)
            self.num_padding_steps += 1
            self.finish()

    # Of both

    def advance(self, *, wait: bool = False) -> None:
        """Launches and finishes the posted plan as far as possible; `wait`: waits for sizes of other engines."""
        handle = self._next
        if handle is None:
            return
        if not handle.is_launched and (wait or self.exchange.has_all()):
            sizes = self.exchange.take(handle.sizes)
            handle.is_launched = True
            self.runner.launch(dataclasses.replace(handle.plan, joint_sizes=sizes))
        if handle.is_launched and handle.is_ready:
            self._next = None
            handle.step = self._last = self.runner.finish(handle.late_data)

    def wait_for_device(self, step: Handle) -> None:
        """Returns when `step` has ended, or when nothing more can be launched meanwhile."""
        self.advance()
        while self._next is not None and not self._next.is_launched and not step.done():
            self.exchange.sleep(_POLL_SECONDS)
            self.advance()

    def _post(self, plan: StepPlan) -> None:
        self.advance(wait=True)
        assert self._next is None, "a step was launched before the one before it was finished"
        sizes = self.runner.sizes_of(plan)
        self.exchange.post(sizes)
        self._next = LockstepHandle(self, plan, sizes)


class LockstepHandle:
    """A step that may not be launched yet."""

    def __init__(self, owner: LockstepExecutor, plan: StepPlan, sizes: StepSizes) -> None:
        self.owner = owner
        self.plan = plan
        self.sizes = sizes
        self.late_data: DrawEdits | None = None
        self.is_launched = False
        self.is_ready = False  # `finish` was called: late data is known
        self.step: Handle | None = None  # once launched and finished

    def wait(self) -> StepResult:
        step = self._launched()
        self.owner.wait_for_device(step)
        result = step.wait()
        self.owner.check()
        return result

    def done(self) -> bool:
        self.owner.advance()
        return self.step is not None and self.step.done()

    def wait_until_ended(self) -> None:
        step = self._launched()
        self.owner.wait_for_device(step)
        step.wait_until_ended()
        self.owner.check()

    @property
    def has_no_result(self) -> bool:
        return self._launched().has_no_result

    @property
    def interval(self) -> StepInterval | None:
        return _LaterInterval(self) if self.step is None else self.step.interval

    def _launched(self) -> Handle:
        if self.step is None:
            self.owner.advance(wait=True)
        assert self.step is not None, "a step waits for its late data"
        return self.step


class _LaterInterval:
    """Of a step that is launched later. The device timer asks at any time whether it has ended, and for the rest once
    it has."""

    def __init__(self, handle: LockstepHandle) -> None:
        self._handle = handle

    def _interval(self) -> StepInterval:
        interval = None if self._handle.step is None else self._handle.step.interval
        return _NOT_REACHED if interval is None else interval

    @property
    def started(self) -> Point:
        return self._interval().started

    @property
    def ended(self) -> Point:
        return self._interval().ended

    @property
    def late(self) -> tuple[Point, Point] | None:
        return self._interval().late


class _NotReached:
    """An event that is not reached, and an interval of such events."""

    late = None

    def done(self) -> bool:
        return False

    def since(self, earlier: Point) -> float:
        raise AssertionError("the time of an event is read before the event")

    @property
    def started(self) -> Point:
        return self

    ended = started


_NOT_REACHED = _NotReached()


def _copied(late: DrawEdits) -> DrawEdits:
    """The owner of the arrays reuses them after `finish`, and the step is launched later."""
    bias, offsets = late.bias, late.offsets
    return dataclasses.replace(
        late,
        rows=late.rows.copy(),
        bits=late.bits.copy(),
        bias=None if bias is None else DrawBias(bias.rows.copy(), bias.ids.copy(), bias.values.copy()),
        offsets=None if offsets is None else offsets.copy(),
    )


def padding_plan(num_groups: int) -> StepPlan:
    """A plan without rows: the device computes padding only, and no token is drawn."""
    return StepPlan(
        step=0,
        released=NO_INTS,
        admitted=(),
        rows=NO_INTS,
        num_tokens=NO_INTS,
        lengths=NO_INTS,
        num_drawn=NO_INTS,
        num_host_tokens=NO_INTS,
        tokens=NO_INTS,
        new_pages=(NO_PAGES,) * num_groups,
    )


# SharedExperts: connects an engine with the engines that share its experts.


class SharedExperts:
    def __init__(self, config: EngineConfig, folder: Path) -> None:
        """`folder`: for the exchange of addresses, the same for all engines."""
        self._config = config
        self._folder = folder
        self._joined: tuple[Group, StepExchange] | None = None

    def join(self, device: torch.device) -> Group:
        """Waits until all engines have loaded."""
        index, count = self._config.model.engine, self._config.model.num_engines
        listener = listen_for_peers(index, self._folder)
        group = Group(index, count, self._folder / "store", device=device)  # returns when all have joined: all listen
        exchange = connect_peers(index, count, listener, self._folder)
        self._watch = RankWatch(exchange.files, group.abort)
        self._joined = group, exchange
        return group

    def executor(self, runner: ModelRunner) -> LockstepExecutor:
        """Launches joint steps."""
        assert self._joined is not None, "the engines have not joined"
        group, exchange = self._joined
        self._watch.stop()
        exchange.check()
        return LockstepExecutor(runner, exchange, len(self._config.cache.groups), group)


# StepExchange: engines that share experts send each other the sizes of their next steps, over sockets between hosts.
#
# Every joint step has a number, and every engine posts its sizes for every number once, in order. An engine posts when
# it has planned a step, or when another engine has posted the number and it has nothing to compute: it then takes part
# with a padding step. So there is a joint step exactly when some engine has a plan, and engines without requests sleep
# until a message arrives: no message says "sleep" or "wake". Posting never waits. Reading waits only for sizes that
# have not arrived when the step has to be launched; `num_waits` counts these waits. Nothing here touches the device.

_MESSAGE = struct.Struct("<QIIB")  # number of the step, tokens, last tokens, flags
_LEAVES = 128  # a flag: the engine ends on purpose
_CONNECT_SECONDS = 60.0


class StepExchange:
    def __init__(self, rank: int, links: Mapping[int, socket.socket]) -> None:
        """`links`: connected sockets by the rank of the other engine."""
        self.rank = rank
        self.num_posted = 0  # joint steps for which this engine has posted
        self.num_waits = 0
        self._peers = [_Peer(other, link) for other, link in sorted(links.items())]

    @property
    def files(self) -> list[int]:
        """File descriptors that become readable when a message arrives."""
        return [peer.link.fileno() for peer in self._peers]

    def post(self, sizes: StepSizes) -> None:
        """Sends the sizes of this engine's next step."""
        flags = sizes.is_single | sizes.only_last << 1 | sizes.can_replay << 2
        data = _MESSAGE.pack(self.num_posted, sizes.tokens, sizes.last_tokens, flags)
        self.num_posted += 1
        for peer in self._peers:
            peer.send(data)

    def is_behind(self) -> bool:
        """Whether another engine has posted for a step for which this one has not."""
        self._receive()
        return any(peer.num_posted > self.num_posted for peer in self._peers)

    def has_all(self) -> bool:
        """Whether the sizes of all other engines for the oldest step that was not taken have arrived."""
        if any(not peer.sizes for peer in self._peers):
            self._receive()
        return all(peer.sizes for peer in self._peers)

    def take(self, own: StepSizes) -> StepSizes:
        """The sizes of the oldest step that was not taken, over all engines. Waits for those that are missing."""
        if not self.has_all():
            self.num_waits += 1
            while not self.has_all():
                self.sleep(None)
        for peer in self._peers:
            own = own.joined(peer.sizes.popleft())
        return own

    def sleep(self, seconds: float | None) -> None:
        """Waits until a message of an engine whose sizes are missing arrives; `seconds`: at most."""
        for peer in self._peers:
            if not peer.sizes:
                peer.check()
        select.select([peer.link for peer in self._peers if not peer.sizes], [], [], seconds)

    def check(self) -> None:
        """Raises EngineDead where another engine has ended or left."""
        for peer in self._peers:
            peer.receive()
            peer.check()

    def leave(self) -> None:
        """Notifies the other engines that this engine ends on purpose, and closes the connections."""
        for peer in self._peers:
            peer.send(_MESSAGE.pack(self.num_posted, 0, 0, _LEAVES))
            peer.link.close()

    def _receive(self) -> None:
        for peer in self._peers:
            peer.receive()


class _Peer:
    """Sizes that another engine has posted."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        link.setblocking(False)
        self.rank = rank
        self.link = link
        self.num_posted = 0
        self.sizes: deque[StepSizes] = deque()  # of steps that were not taken
        self._data = b""
        self._end: str | None = None  # how the connection ended

    def send(self, data: bytes) -> None:
        """A few messages of 17 bytes are under way at most, so the socket's buffer always has room. `receive` reports a
        lost connection, after what the other engine has posted."""
        with contextlib.suppress(ConnectionError):
            sent = self.link.send(data)
            assert sent == len(data), "the buffer of a socket between engines is full"

    def receive(self) -> None:
        """Reads what has arrived. Raises EngineDead if the other engine has ended without leaving."""
        while self._end is None:
            try:
                if data := self.link.recv(4096):
                    self._data += data
                else:
                    self._end = "has ended"
            except BlockingIOError:
                break
            except ConnectionResetError:
                pass  # the other engine had messages unread; its own can still be read
        whole = len(self._data) // _MESSAGE.size * _MESSAGE.size
        for number, tokens, last_tokens, flags in _MESSAGE.iter_unpack(self._data[:whole]):
            if flags & _LEAVES:
                self._end = "was closed"
                continue
            assert number == self.num_posted, f"rank {self.rank} posted step {number}, expected {self.num_posted}"
            self.num_posted += 1
            self.sizes.append(StepSizes(tokens, last_tokens, bool(flags & 1), bool(flags & 2), bool(flags & 4)))
        self._data = self._data[whole:]
        if self._end == "has ended":
            self.check()

    def check(self) -> None:
        """Raises EngineDead if the connection has ended, by a death or by `leave`."""
        if self._end is not None:
            raise EngineDead(f"rank {self.rank} {self._end}; it has a part of the experts, so all ranks end")


def connect_peers(rank: int, size: int, listener: socket.socket, folder: Path) -> StepExchange:
    """Connects all engines with each other. Every engine must be listening before the first calls this."""
    links = {other: join_rank(str(folder / f"rank-{other}"), b"", rank) for other in range(rank)}
    links |= accept_ranks(listener, b"", range(rank + 1, size), _CONNECT_SECONDS)
    listener.close()
    return StepExchange(rank, links)


def listen_for_peers(rank: int, folder: Path) -> socket.socket:
    """The socket to which ranks above this one connect."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / f"rank-{rank}"))
    listener.listen(256)
    return listener
