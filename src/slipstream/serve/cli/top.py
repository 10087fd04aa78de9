"""`slipstream top`: a live view of a running server: requests, tokens per second, cache, device time."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from slipstream.base.errors import EngineDead, InvalidOption, UserError
from slipstream.serve.bench.tables import bar
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from http.client import HTTPResponse

_CAUSES = {
    "turnaround": "turnaround",
    "host_late": "host late",
    "output": "caller late",
    "grammar": "late masks",
    "no_requests": "no requests",
}
_WIDTH = 30


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "top",
        help="watch a running server",
        description="Shows a running server once per second: requests, tokens per second, KV cache, busy and idle time "
        "of the device by cause. The server logs steps only while this runs.",
        usage="slipstream top [URL] [flags]",
        allow_abbrev=False,
    )
    command.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="address of the server")
    command.add_argument("--api-key", metavar="KEY", help="API key of the server (default: SLIPSTREAM_API_KEY)")
    command.add_argument("--once", action="store_true", help="print one second and exit")
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None
    is_terminal = sys.stdout.isatty() and not args.once
    began: float | None = None
    steps: list[dict[str, Any]] = []
    for event in _events(args.url, "/debug/timeline", key):
        began = event["now"] if began is None else began
        steps += [dict(zip(event["fields"], values, strict=True)) for values in event["steps"]]
        if event["now"] - began < 1.0:
            continue
        load = _get(args.url, "/load", key)
        lines = view(event["models"], load, steps, event["now"] - began)
        print(("\x1b[H\x1b[2J" if is_terminal else "") + "\n".join(lines), flush=True)
        if args.once:
            return 0
        began, steps = event["now"], []
    raise EngineDead("the server has ended the stream; it is shutting down")


def view(models: Sequence[str], load: dict[str, Any], steps: Sequence[dict[str, Any]], seconds: float) -> list[str]:
    """The lines of one second."""
    names = ("drawn", "prefill_tokens", "drafts", "accepted")
    drawn, prefill, drafts, accepted = (sum(step[name] for step in steps) for name in names)
    generated = drawn - drafts + accepted  # rejected drafts are among the drawn tokens
    rows = sum(step["rows"] for step in steps) / len(steps) if steps else 0.0
    used = load["pages"] - load["free_pages"]
    share = used / load["pages"] if load["pages"] else 0.0
    times = dict.fromkeys(_CAUSES, 0.0)
    busy = 0.0
    for step in steps:
        busy += step["end"] - step["start"] - step["late"]
        times[step["cause"]] += step["gap"]
        times["grammar"] += step["late"]
    if not steps:
        times["no_requests"] = seconds
    total = max(busy + sum(times.values()), 1e-9)
    lines = [
        f"{', '.join(models)}: {len(steps) / seconds:.0f} steps/s, {rows:.1f} rows per step",
        f"tokens    {generated / seconds:>9.0f} /s generated {prefill / seconds:>9.0f} /s prefill",
        f"requests  {load['running']:>9} running     {load['waiting']:>9} waiting  {load['server_load']} open",
        f"cache     {share:>9.0%} {bar(share, _WIDTH)}",
        f"device    {busy / total:>9.0%} {bar(busy / total, _WIDTH)} busy",
    ]
    if drafts:
        lines.insert(2, f"drafts    {accepted / drafts:>9.0%} accepted of {drafts / seconds:.0f} /s")
    for name, text in _CAUSES.items():
        if times[name] > 0:
            lines.append(f"  idle    {times[name] / total:>9.1%} {bar(times[name] / total, _WIDTH)} {text}")
    return lines


def _open(url: str, path: str, key: str | None) -> HTTPResponse:
    import http.client  # slow to import, and only needed here
    from urllib.parse import urlsplit

    parts = urlsplit(url if "//" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidOption(f"url is {url!r}; give one like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname, parts.port, timeout=30)
    try:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        raise EngineDead(f"the server cannot be reached: {error or type(error).__name__}") from None
    if response.status != 200:
        raise UserError(f"{path} answered {response.status}: {response.read(300).decode(errors='replace')}")
    return response


def _get(url: str, path: str, key: str | None) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_open(url, path, key).read())
    return found


def _events(url: str, path: str, key: str | None) -> Iterator[dict[str, Any]]:
    from http.client import HTTPException

    response = _open(url, path, key)
    try:
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    except (OSError, HTTPException) as error:
        raise EngineDead(f"the server is lost: {error or type(error).__name__}") from None
    finally:
        response.close()
