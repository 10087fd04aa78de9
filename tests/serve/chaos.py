"""Chaos: many clients at once that read, hang up, send nonsense or are aborted. Every request ends exactly once.

python tests/serve/chaos.py --num 20000 --clients 200      # the long way, on a tiny model; watches memory too
python tests/serve/chaos.py --num 12000 --clients 2500 --queue 4000 --rows 512 --pages 8192      # thousands of streams
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from patience import PATIENCE


async def run_chaos(port: int, num: int, clients: int, seed: int) -> Counter[str]:
    """How each request ended, counted. Raises if one ended twice, or not at all."""
    draw = random.Random(seed)
    ends: Counter[str] = Counter()
    todo = iter(range(num))
    abort_weight = 0.3 * min(1, 30 / clients)  # each ends all that is under way

    async def client() -> None:
        for _ in todo:
            end = await asyncio.wait_for(_one(port, draw, abort_weight), PATIENCE)
            ends[end] += 1
            if end.endswith("429"):
                await asyncio.sleep(0.05)  # a polite crowd, for all its manners

    await asyncio.gather(*(client() for _ in range(clients)))
    return ends


async def _one(port: int, draw: random.Random, abort_weight: float) -> str:
    kind = draw.choices(
        ["stream", "whole", "leave", "vanish", "silent", "bad", "huge", "nonsense", "late", "abort"],
        [40, 25, 12, 6, 2, 6, 3, 4, 3, abort_weight],
    )[0]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        body: dict[str, Any] = {
            "prompt": [draw.randrange(256) for _ in range(draw.randint(1, 40))],
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice([0, 1]),
            "n": draw.choice([1, 1, 1, 3]),
            "ignore_eos": True,
            "stream": kind != "whole",
            "stop": draw.choice([None, None, "ee", ["a", "bc"]]),
            "priority": draw.randint(-1, 1),
            "logprobs": draw.choice([None, None, 2]),
        }
        headers = {"content-type": "application/json", "authorization": "Bearer key"}
        path = "/v1/completions"
        if kind == "bad":
            body[draw.choice(["temperature", "prompt", "n", "tools", "stop"])] = draw.choice([-5, "x" * 9999, {}, [[]]])
        if kind == "late":
            headers["x-request-timeout"] = "0.05"
        if kind == "abort":
            path, headers["authorization"] = "/abort_requests", "Bearer root"
        data = b"" if kind == "abort" else json.dumps(body).encode()
        if kind == "huge":
            data = b'{"prompt": "' + b"x" * 2**18 + b'"}'
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        message = f"POST {path} HTTP/1.1\r\nhost: [::1]\r\n{head}content-length: {len(data)}\r\n\r\n".encode() + data
        if kind == "nonsense":
            message = bytes(draw.randrange(256) for _ in range(200))
        writer.write(message[:-20] if kind in ("vanish", "silent") else message)
        await writer.drain()
        if kind == "vanish":
            return "vanished"
        status, content = await _answer(reader, leave=kind == "leave")
        if kind == "leave":
            return "left"
        return _checked(kind, status, content, bool(body["stream"]))
    except ConnectionError:
        assert kind in ("nonsense", "huge"), f"{kind}: the server hung up"
        return "hung up on"
    finally:
        writer.close()


async def _answer(reader: asyncio.StreamReader, *, leave: bool) -> tuple[int, bytes]:
    line = await reader.readline()
    if not line:
        raise ConnectionResetError
    status = int(line.split()[1])
    length, chunked = 0, False
    while (header := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = header.lower().partition(b":")
        if name == b"content-length":
            length = int(value)
        chunked |= name == b"transfer-encoding"
    if leave:
        await reader.read(30)
        return status, b""
    if not chunked:
        return status, await reader.readexactly(length)
    content = b""
    while size := int(await reader.readline(), 16):
        content += (await reader.readexactly(size + 2))[:-2]
    await reader.readline()
    return status, content


def _checked(kind: str, status: int, content: bytes, stream: bool) -> str:
    """What was promised: one end, in the right shape."""
    if kind == "silent":
        assert status in (408, 429), (kind, status, content)
        return f"{kind} {status}"
    if kind in ("bad", "huge", "nonsense"):
        assert status in (200, 400, 413, 429), (kind, status, content)
        return f"{kind} {status}"
    assert status in (200, 408, 429), (kind, status, content)
    if status != 200 or kind == "abort":
        assert content.startswith(b'{"error"') or kind == "abort"
        return f"{kind} {status}"
    if not stream:
        reasons = [choice["finish_reason"] for choice in json.loads(content)["choices"]]
    else:
        *parts, rest = content.decode().split("\n\n")
        assert rest == "" and parts.count("data: [DONE]") == 1 and parts[-1] == "data: [DONE]"
        # comments that keep a silent stream alive come where the machine is slow
        events = [json.loads(part.removeprefix("data: ")) for part in parts[:-1] if not part.startswith(":")]
        if "error" in events[-1]:
            assert events[-1]["error"]["code"] == "deadline"
            return f"{kind} deadline"
        ended = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
        assert len({index for index, _ in ended}) == len(ended), "a sample ended twice"
        assert {index for index, _ in ended} == {c["index"] for e in events for c in e["choices"]}, "one did not end"
        reasons = [reason for _, reason in ended]
    assert all(reason in ("stop", "length", "abort") for reason in reasons), reasons
    return "aborted" if "abort" in reasons else "done"


def resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 // 2**20


async def watch_load(server: Any, most: Counter[str]) -> None:
    """Notes the highest of what the server has under way, and the most files it has open."""
    while True:
        _, load = await asyncio.to_thread(server.call, "GET", "/load", authorization="Bearer key")
        for name in ("server_load", "running", "waiting"):
            most[name] = max(most[name], load[name])
        most["files"] = max(most["files"], len(list(Path(f"/proc/{server.process.pid}/fd").iterdir())))
        await asyncio.sleep(0.5)


def main() -> None:
    tests = Path(__file__).parents[1]
    sys.path[:0] = [str(tests.parent / "src"), str(tests), str(tests / "support")]
    from serve.server_process import ServerProcess
    from slipstream.serve.http.server.listen import raise_file_limit
    from tiny import write_tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=20_000)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=4, help="memory is looked at after each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--queue", type=int, default=24, help="prompts that may wait")
    parser.add_argument("--rows", type=int, default=8, help="of the engine")
    parser.add_argument("--pages", type=int, default=48)
    args = parser.parse_args()
    raise_file_limit()  # the clients' end
    with tempfile.TemporaryDirectory() as folder:
        sizes = ("--max-queued-requests", args.queue, "--max-num-seqs", args.rows, "--num-pages", args.pages)
        server = ServerProcess(str(write_tiny(Path(folder), "llama")), *CHAOS_FLAGS, *map(str, sizes))
        core = int(Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()[0])
        for number in range(args.rounds):
            most: Counter[str] = Counter()

            async def one_round(seed: int, most: Counter[str] = most) -> Counter[str]:
                watcher = asyncio.create_task(watch_load(server, most))
                try:
                    return await run_chaos(server.port, args.num // args.rounds, args.clients, seed)
                finally:
                    watcher.cancel()

            start = time.monotonic()
            ends = asyncio.run(one_round(args.seed + number))
            print(  # noqa: T201
                f"round {number}: {time.monotonic() - start:.0f} s; front end {resident(server.process.pid)} MiB, core "
                f"{resident(core)} MiB; at most {dict(most)};", dict(ends), flush=True,
            )  # fmt: skip
        print("exit code", server.stop(), server.lines[-1:])  # noqa: T201


CHAOS_FLAGS = (
    "--max-model-len", "128", "--num-pages", "48", "--page-size", "4", "--max-num-seqs", "8", "--api-key", "key",
    "--admin-key", "root", "--max-body-bytes", "65536", "--max-queued-requests", "24", "--body-timeout", "1",
)  # fmt: skip


if __name__ == "__main__":
    main()
