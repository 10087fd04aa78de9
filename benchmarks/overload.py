"""Behaviour of an overloaded server: completed requests, refusals, and the cost of each, at four times its capacity.

    python benchmarks/overload.py [--times 4] [--rounds 3] [--seconds 5]     a real front end with a scripted core
    python benchmarks/overload.py --model default                          the complete `slipstream serve`
    python benchmarks/overload.py --model DIR --load-format dummy          further flags go to the server

First the peak: as many concurrent streams as the queue accepts, each replaced when it ends. Then an open loop: requests
at random times, at the peak rate and at a multiple of it, in alternating rounds, so that other load on the machine
affects both alike. Goodput is completed responses per second, counted after the queue is full. The time of a refusal is
from the last byte sent to the first byte received. The load uses keep-alive connections of this process, whose CPU time
is reported: near a whole core, the load generator is the limit. Also reported is the time in which the front end was
runnable but another process had the core; --nice -10 avoids this if the user may set it.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import random
import re
import selectors
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from front_end import PROMPT, TEXT_IDS, cpu_seconds, request, say_hello, start_front, wait_ready

from slipstream.contracts.messages import Abort, Output, Submit
from slipstream.contracts.request import FinishReason
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.transport.sockets import SocketServer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="model to serve, or `default`; without it the core is scripted")
    parser.add_argument("--times", type=float, default=4.0, help="multiple of the peak rate")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="seconds per part")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per response")
    parser.add_argument("--prompt-len", type=int, default=0, help="random token ids per prompt; 0: a text of 20 words")
    parser.add_argument("--queue", type=int, default=64, help="maximum of waiting requests")
    parser.add_argument("--rows", type=int, default=32, help="rows of the scripted core")
    parser.add_argument("--step-ms", type=float, default=5.0, help="step time of the scripted core")
    parser.add_argument("--nice", type=int, default=0, help="niceness of all processes; negative: higher priority")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # runs the scripted core
    args, more = parser.parse_known_args()
    if args.core is not None:
        play_paced_core(args.core, args.rows, args.step_ms / 1000)
        return
    if args.nice:
        os.setpriority(os.PRIO_PROCESS, 0, args.nice)
        if (group := Path("/proc/self/autogroup")).exists():
            group.write_text(str(args.nice))  # on systems that share time between sessions (autogroup)
    server = Served(args, more) if args.model else Scripted(args)
    try:
        report = measure(server, args)
    finally:
        server.stop()
    if args.json:
        print(json.dumps(report))
        return
    for name, part in report.items():
        if isinstance(part, dict):
            print(f"{name:<8}" + "  ".join(f"{key} {value:,.4g}" for key, value in part.items() if value is not None))
        else:
            print(f"{name:<8}{part:.3f}")


def measure(server: Scripted | Served, args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(0)
    prompt: Any = PROMPT
    body = {"max_tokens": args.tokens, "stream": True, "ignore_eos": True, "temperature": 0}

    def next_request() -> bytes:
        ids = [draw.randrange(3, 250) for _ in range(args.prompt_len)]
        return request("/v1/completions", body | {"prompt": ids or prompt})

    made = [next_request() for _ in range(256)]  # prepared before the measurement
    load = Load(server.port, lambda: made[draw.randrange(len(made))])
    running = args.rows if not args.model else server.max_running
    load.closed_loop(args.queue // 2 + running, 1.0)  # warm-up
    peak = sum_up([load.closed_loop(args.queue // 2 + running, args.seconds)], server)
    if not peak["goodput"]:
        raise SystemExit(f"no request completed within {args.seconds:g} s; increase --seconds or reduce --tokens")
    parts: dict[float, list[Window]] = {1.0: [], args.times: []}
    for _ in range(args.rounds):
        for times, windows in parts.items():
            windows.append(load.open_loop(times * peak["goodput"], args.seconds, server.pids))
    report = {"peak": peak} | {f"{times:g}x": sum_up(windows, server) for times, windows in parts.items()}
    best = max(peak["goodput"], report["1x"]["goodput"])
    return report | {"kept": report[f"{args.times:g}x"]["goodput"] / best}


# The load generator: one thread, plain sockets


@dataclass
class Window:
    """Counts of a time window."""

    seconds: float = 0.0
    offered: int = 0
    done: int = 0
    refused: list[float] = field(default_factory=list)  # seconds per refusal
    late: list[float] = field(default_factory=list)  # seconds between the due time and the sending of a request
    failed: int = 0
    cpu: dict[str, float] = field(default_factory=dict)


@dataclass
class Asked:
    sent: float
    tail: bytes = b""


class Load:
    def __init__(self, port: int, next_request: Callable[[], bytes]) -> None:
        self.port = port
        self.next_request = next_request
        self.selector = selectors.DefaultSelector()
        self.idle: deque[socket.socket] = deque()
        self.num_open = 0
        self.window = Window()

    def closed_loop(self, concurrency: int, seconds: float) -> Window:
        """`concurrency` requests at a time. After a refusal the next request waits a little."""
        self.window = Window()
        now = start = time.perf_counter()
        while now < start + seconds:
            num_refused = len(self.window.refused)
            while self.num_open < concurrency and len(self.window.refused) == num_refused:
                self.ask()
                self.take(0.0)
            self.take(min(0.02, start + seconds - now))
            now = time.perf_counter()
        self.window.seconds = time.perf_counter() - start
        window, self.window = self.window, Window()
        self.drain()
        return window

    def open_loop(self, rate: float, seconds: float, pids: dict[str, int]) -> Window:
        """Requests at random times, independent of completions. Counting starts after one second, when the queue is
        full."""
        draw = random.Random(1)
        start = time.perf_counter()
        begin, end, due = start + max(1.0, 0.2 * seconds), start + max(1.0, 0.2 * seconds) + seconds, start
        counting = False
        while (now := time.perf_counter()) < end:
            if not counting and now >= begin:
                counting, self.window, began = True, Window(), now
                before = self._cpu(pids)
            while due <= now:
                self.window.late.append(now - due)
                self.ask()
                due += draw.expovariate(rate)
                now = time.perf_counter()
            self.take(max(0.0, min(due, end) - time.perf_counter()))
        window = self.window
        window.seconds = time.perf_counter() - began
        after = self._cpu(pids)
        window.cpu = {name: (after[name] - before[name]) / window.seconds for name in after}
        self.window = Window()
        self.drain()
        return window

    def ask(self) -> None:
        if self.idle:
            sock = self.idle.pop()
        else:
            sock = socket.create_connection(("127.0.0.1", self.port))
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(self.next_request())
        self.selector.register(sock, selectors.EVENT_READ, Asked(time.perf_counter()))
        self.num_open += 1
        self.window.offered += 1

    def take(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            asked: Asked = key.data
            sock: socket.socket = key.fileobj  # type: ignore[assignment]
            data = sock.recv(2**16)
            text = asked.tail + data
            if text.startswith(b"HTTP/1.1 429"):
                self.window.refused.append(time.perf_counter() - asked.sent)
            elif text.endswith(b"0\r\n\r\n"):
                self.window.done += 1
            elif data and not text.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")):
                asked.tail = text[-16:]
                continue
            else:
                self.window.failed += 1
            self.selector.unregister(sock)
            self.num_open -= 1
            if data:
                self.idle.append(sock)
            else:
                sock.close()

    def drain(self) -> None:
        while self.num_open:
            self.take(1.0)

    def _cpu(self, pids: dict[str, int]) -> dict[str, float]:
        found = {f"{name}_cpu": cpu_seconds(pid) for name, pid in pids.items()} | {"load_cpu": time.process_time()}
        return found | {"front_kept_waiting": waited_seconds(pids["front"])}


def waited_seconds(pid: int) -> float:
    """Seconds in which the process was runnable but did not run."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def sum_up(windows: list[Window], server: Scripted | Served) -> dict[str, Any]:
    seconds = sum(window.seconds for window in windows)
    refused = [one for window in windows for one in window.refused]
    late = [one for window in windows for one in window.late]
    cpu = {
        name: sum(window.cpu.get(name, 0.0) * window.seconds for window in windows) / seconds for name in windows[0].cpu
    }
    return {
        "offered": sum(window.offered for window in windows) / seconds,
        "goodput": sum(window.done for window in windows) / seconds,
        "worst": min(window.done / window.seconds for window in windows),
        "refused": len(refused) / seconds,
        "failed": sum(window.failed for window in windows),
        "refused_p50_ms": percentile(refused, 0.5),
        "refused_p99_ms": percentile(refused, 0.99),
        "load_late_p99_ms": percentile(late, 0.99),
        **cpu,
    }


def percentile(values: list[float], share: float) -> float | None:
    return 1000 * heapq.nlargest(max(1, int(len(values) * (1 - share)) or 1), values)[-1] if values else None


# The servers


class Scripted:
    """A real front end; the scripted core gives each row one token per step, and a step takes a fixed time."""

    def __init__(self, args: argparse.Namespace) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(2048)
        self.port = listener.getsockname()[1]
        ours, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--core", str(theirs.fileno()), "--rows", str(args.rows)]
        command += ["--step-ms", str(args.step_ms)]
        self.core = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self.front = start_front(listener, ours, ServerSettings(log_level="error", max_queued_requests=args.queue))
        for sock in (listener, ours, theirs):
            sock.close()
        wait_ready(self.port)
        self.pids = {"front": self.front.pid, "core": self.core.pid}

    def stop(self) -> None:
        self.front.terminate()
        self.front.wait()
        self.core.wait()


class Served:
    """`slipstream serve` with its defaults."""

    def __init__(self, args: argparse.Namespace, flags: list[str]) -> None:
        model = [] if args.model == "default" else [args.model]
        command = [sys.executable, "-m", "slipstream.serve.cli.main", "serve", *model, "--port", "0"]
        command += ["--max-queued-requests", str(args.queue), *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"listening on http://[^ ]*:(\d+)", line):
                self.port = int(found[1])
            if "ready: serving" in line:
                break
        else:
            raise SystemExit("the server did not start")
        self.max_running = int(flags[flags.index("--max-num-seqs") + 1]) if "--max-num-seqs" in flags else 8
        self.pids = {"front": self.process.pid, "core": children(self.process.pid)[0]}

    def stop(self) -> None:
        self.process.terminate()
        assert self.process.stderr is not None
        self.process.stderr.read()
        self.process.wait()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def play_paced_core(fd: int, num_rows: int, step_seconds: float) -> None:
    hub = SocketServer([socket.socket(fileno=fd)])
    say_hello(hub)
    waiting: deque[Submit] = deque()
    running: dict[str, int] = {}
    due = time.monotonic()
    step = 0
    while hub.connections:
        messages, _ = hub.receive(wait=not running and not waiting)
        for _, message in messages:
            if isinstance(message, Submit):
                waiting.append(message)
            elif isinstance(message, Abort):
                running.pop(message.request_id, None)
                waiting = deque(one for one in waiting if one.request_id != message.request_id)
        while waiting and len(running) < num_rows:
            first = waiting.popleft()
            running[first.request_id] = first.params.max_tokens or 1  # type: ignore[union-attr]
        if not running or not hub.connections:
            due = time.monotonic()
            continue
        due = max(due + step_seconds, time.monotonic())
        time.sleep(due - time.monotonic() if due > time.monotonic() else 0)
        step += 1
        outputs = []
        for name, left in list(running.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(Output(name, 0, [TEXT_IDS[step % len(TEXT_IDS)]], None, reason))
            if reason is None:
                running[name] = left - 1
            else:
                del running[name]
        hub.send(hub.connections[0], outputs)


if __name__ == "__main__":
    main()
