"""Cost of a front end: a real server process with a scripted core.

    python benchmarks/front_end.py [--requests 6000] [--streams 64] [--tokens 256] [--chats] [--json]

Three processes: the front end, the scripted core, and the load generator. Short requests are completions of one token,
so each pays for HTTP, JSON, tokenization, the round trip to the core, and a response; embeddings are of the same text
and return base64; refusals are 429 responses while the queue is full. Streams get one token per step, as fast as the
front end accepts them. With --chats also short requests and streams of each chat API, with a call and its result.
Reported are the rates that the load generator sees, and the CPU time of the front end per unit. On a shared machine
the CPU time is the reliable figure; 1 / CPU time is the rate of a dedicated core.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from slipstream.checkpoint.generation import GenerationDefaults
from slipstream.checkpoint.locate import default_embedder, locate
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.contracts.messages import Abort, Output, Pooled, Submit
from slipstream.contracts.request import FinishReason
from slipstream.engine.model_description import ModelDescription
from slipstream.params.pooling import PoolingParams
from slipstream.serve.http.server.settings import ServerSettings
from slipstream.transport.frames import ModelDescriptions, Ready
from slipstream.transport.sockets import Connection, SocketServer

PROMPT = "Wind moves the tall grass of the valley while a slow river carries leaves past the old mill."
QUEUE = 1024  # waiting prompts
HELD = 7777  # the core never starts prompts with this max_tokens
TEXT_IDS = [504, 2060, 5532, 253, 3714, 8187, 282, 28, 338, 30]  # arbitrary ids


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=6000, help="number of short requests")
    parser.add_argument("--connections", type=int, default=32, help="connections for short requests")
    parser.add_argument("--streams", type=int, default=64, help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per stream")
    parser.add_argument("--rounds", type=int, default=4, help="rounds of streams")
    parser.add_argument("--chats", action="store_true", help="also short requests and streams of each chat API")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--core", type=int, help=argparse.SUPPRESS)  # runs the scripted core
    args = parser.parse_args()
    if args.core is not None:
        play_core(args.core)
        return
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    ours, theirs = socket.socketpair()
    core = subprocess.Popen([sys.executable, __file__, "--core", str(theirs.fileno())], pass_fds=[theirs.fileno()])
    front = start_front(listener, ours, ServerSettings(log_level="error", max_queued_requests=QUEUE))
    for sock in (listener, ours, theirs):
        sock.close()
    try:
        wait_ready(port)
        results = {}
        for name, data in (("short requests", COMPLETION), ("embeddings", EMBEDDING)):
            run_short(port, min(args.requests, 500), args.connections, data)  # warm-up
            results[name] = measure(front.pid, partial(run_short, port, args.requests, args.connections, data))
        with full_queue(port):
            refuse = partial(run_short, port, args.requests, args.connections, COMPLETION, b"429")
            results["refusals"] = measure(front.pid, refuse)
        results["streamed tokens"] = measure(front.pid, partial(run_streams, port, *COMPLETION_STREAM, args))
        for name, (path, body, limit) in CHATS.items() if args.chats else ():
            short = request(path, merged(body, limit, 1, stream=False))
            run_short(port, min(args.requests, 500), args.connections, short)
            results[name] = measure(front.pid, partial(run_short, port, args.requests, args.connections, short))
            results[f"{name} tokens"] = measure(front.pid, partial(run_streams, port, path, body, limit, args))
    finally:
        front.terminate()
        front.wait()
        core.wait()
    if args.json:
        print(json.dumps(results))
        return
    for name, result in results.items():
        print(
            f"{name:<16} {result['per_second']:>9,.0f} /s   front-end CPU {result['cpu_us']:6.1f} us each, "
            f"{1e6 / result['cpu_us']:>9,.0f} /s on a dedicated core; {result['events']:,} writes of events"
        )


def start_front(listener: socket.socket, core: socket.socket, settings: ServerSettings) -> subprocess.Popen[bytes]:
    fds = [listener.fileno(), core.fileno()]
    command = [sys.executable, "-m", "slipstream.serve.http.worker_main", *map(str, fds)]
    front = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)
    assert front.stdin is not None
    front.stdin.write(msgspec.json.encode(settings))
    front.stdin.close()
    return front


def measure(pid: int, work: Any) -> dict[str, float]:
    """`work` returns the number of units and the number of event writes."""
    cpu, start = cpu_seconds(pid), time.perf_counter()
    count, events = work()
    seconds = time.perf_counter() - start
    cpu = cpu_seconds(pid) - cpu
    return {"count": count, "events": events, "per_second": count / seconds, "cpu_us": 1e6 * cpu / count}


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# The scripted core


def play_core(fd: int) -> None:
    hub = SocketServer([socket.socket(fileno=fd)])
    vector = np.linspace(-1, 1, 384, dtype=np.float32)
    say_hello(hub)
    running: dict[str, tuple[Connection, int]] = {}
    outputs: list[Output] = []
    step = 0
    while hub.connections:
        messages, _ = hub.receive(wait=not running and not outputs)
        for connection, message in messages:
            if isinstance(message, Submit) and isinstance(message.params, PoolingParams):
                outputs.append(Output(message.request_id, 0, [], None, FinishReason.STOP, pooled=Pooled.of(vector)))
            elif isinstance(message, Submit) and message.params.max_tokens != HELD:
                running[message.request_id] = connection, message.params.max_tokens or 1  # type: ignore[union-attr]
            elif isinstance(message, Abort):
                running.pop(message.request_id, None)
        # waits for a front end that is behind, as a real core would be slower
        if any(len(connection.unsent) > 2**16 for connection in hub.connections):
            time.sleep(0.0005)
            continue
        step += 1
        token = TEXT_IDS[step % len(TEXT_IDS)]
        for name, (connection, left) in list(running.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(Output(name, 0, [token], None, reason))
            if reason is None:
                running[name] = connection, left - 1
            else:
                del running[name]
        if outputs and hub.connections:
            hub.send(hub.connections[0], outputs)
        outputs.clear()


def say_hello(hub: SocketServer) -> None:
    """Announces the default models, as a real core does."""
    path = str(locate(None).path)
    facts = ModelDescription(
        name="scripted", tokenizer=path, chat_template=None, defaults=GenerationDefaults(), max_model_len=8192,
        max_positions=8192, vocab_size=49152,
    )  # fmt: skip
    pooling = PoolingInfo(methods=("mean",), is_causal=False, embed_size=384, token_size=384, max_seq_length=256)
    embedder = msgspec.structs.replace(
        facts, name="embedder", tokenizer=str(default_embedder().path), vocab_size=30522, max_model_len=256,
        pooling=pooling,
    )  # fmt: skip
    hub.broadcast(ModelDescriptions([facts, embedder], os.getpid()))
    hub.broadcast(Ready())


# The load generator: plain sockets, to use less CPU than the server


def wait_ready(port: int) -> None:
    for _ in range(600):
        try:
            if ask(port, "/ready", b" 200 "):
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise SystemExit("the front end did not start")


def ask(port: int, path: str, text: bytes) -> bool:
    """Whether the response contains `text`."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
        return text in sock.recv(4096)


def request(path: str, body: dict[str, Any]) -> bytes:
    data = msgspec.json.encode(body)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


COMPLETION = request("/v1/completions", {"prompt": PROMPT, "max_tokens": 1})
COMPLETION_STREAM = "/v1/completions", {"prompt": PROMPT}, "max_tokens"
EMBEDDING = request("/v1/embeddings", {"input": PROMPT, "model": "embedder", "encoding_format": "base64"})


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
ASKED = {"role": "user", "content": PROMPT}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "rain"}
HISTORY = [ASKED, {"role": "assistant", "content": "", "tool_calls": [CALL]}, RESULT]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": PROMPT}]},
    {"role": "assistant",
     "content": [{"type": "tool_use", "id": "call_1", "name": "weather", "input": {"city": "Oslo"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "rain"}]},
]  # fmt: skip
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": PROMPT}]},
    {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": '{"city": "Oslo"}'},
    {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
]
OLLAMA = [
    ASKED,
    {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    {"role": "tool", "tool_name": "weather", "content": "rain"},
]
# route, body, and the field that limits the tokens
CHATS: dict[str, tuple[str, dict[str, Any], str]] = {
    "OpenAI chat": ("/v1/chat/completions", {"messages": HISTORY, "tools": [TOOL]}, "max_tokens"),
    "Responses": (
        "/v1/responses",
        {"input": ITEMS, "tools": [{"type": "function", **TOOL["function"]}], "store": False},  # type: ignore[dict-item]
        "max_output_tokens",
    ),
    "Anthropic": (
        "/v1/messages",
        {"model": "scripted", "messages": BLOCKS, "tools": [{"name": "weather", "input_schema": SCHEMA}]},
        "max_tokens",
    ),
    "Ollama": ("/api/chat", {"model": "scripted", "messages": OLLAMA, "tools": [TOOL]}, "options.num_predict"),
    "Cohere": ("/v2/chat", {"model": "scripted", "messages": HISTORY, "tools": [TOOL]}, "max_tokens"),
}


def merged(body: dict[str, Any], limit: str, tokens: int, *, stream: bool) -> dict[str, Any]:
    """The body with a number of tokens in the field `limit`."""
    outer, _, inner = limit.partition(".")
    return body | {"stream": stream, outer: {inner: tokens} if inner else tokens}


@contextmanager
def full_queue(port: int) -> Iterator[None]:
    """Fills the queue, including the reserve for new callers, with prompts that the core never starts."""
    with ExitStack() as stack:
        queued = 0
        for count in (QUEUE, QUEUE // 4):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            sock.sendall(request("/v1/completions", {"prompt": [[1]] * count, "max_tokens": HELD}))
            queued += count
            while not ask(port, "/load", f'"queued_requests":{queued},'.encode()):
                time.sleep(0.01)
        yield
    while not ask(port, "/load", b'"queued_requests":0,'):
        time.sleep(0.01)


def run_short(port: int, count: int, connections: int, data: bytes, status: bytes = b"200") -> tuple[int, int]:
    """Closed loop: each connection sends its next request when it has its response."""
    selector = selectors.DefaultSelector()
    to_send = count
    for _ in range(connections):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        selector.register(sock, selectors.EVENT_READ)
        sock.sendall(data)
        to_send -= 1
    done = 0
    while done < count:
        for key, _ in selector.select():
            sock = key.fileobj  # type: ignore[assignment]
            answer = sock.recv(65536)
            assert answer, "the front end closed a connection"
            assert answer[9:12] == status or not answer.startswith(b"HTTP/1.1 "), answer[:400]
            if answer.endswith(b"}"):
                done += 1
                if to_send > 0:
                    to_send -= 1
                    sock.sendall(data)
    for key in list(selector.get_map().values()):
        key.fileobj.close()  # type: ignore[union-attr]
    return count, count


def run_streams(port: int, path: str, body: dict[str, Any], limit: str, args: argparse.Namespace) -> tuple[int, int]:
    data = request(path, merged(body, limit, args.tokens, stream=True))
    events = 0
    for _ in range(args.rounds):
        selector = selectors.DefaultSelector()
        for _ in range(args.streams):
            sock = socket.create_connection(("127.0.0.1", port))
            selector.register(sock, selectors.EVENT_READ)
            sock.sendall(data)
        left = args.streams
        while left:
            for key, _ in selector.select():
                sock = key.fileobj  # type: ignore[assignment]
                answer = sock.recv(2**18)
                assert answer, "the front end closed a stream"
                events += answer.count(b"\ndata: ") + answer.count(b'{"model":')
                if answer.endswith(b"0\r\n\r\n"):  # the last chunk
                    selector.unregister(sock)
                    sock.close()
                    left -= 1
    return args.streams * args.tokens * args.rounds, events


if __name__ == "__main__":
    main()
