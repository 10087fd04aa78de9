"""`slipstream bench serve`: measures a running server."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from slipstream.base.errors import EngineDead, InvalidOption
from slipstream.base.log import progress
from slipstream.serve.bench.tables import latency_chart, show
from slipstream.serve.bench.workload import Workload
from slipstream.serve.charts import svg_charts


def add_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("bench serve")
    group.add_argument("--url", metavar="URL", help="URL of the server, for example http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="API key of the server (default: SLIPSTREAM_API_KEY)")


def run_serve(args: argparse.Namespace, workload: Workload, changes: dict[str, Any]) -> int:
    from slipstream.serve.bench.online import (
        Target,
        histogram,
        run_online,
    )  # imports asyncio, which --help does not need

    if args.url is None:
        raise InvalidOption("bench serve needs --url; give one like http://127.0.0.1:8000")
    key = args.api_key or os.environ.get("SLIPSTREAM_API_KEY", "").split(",")[0] or None
    target = Target.parse(args.url, getattr(args, "model", None), key)
    params = {"temperature": 0.0, "ignore_eos": True} | changes
    with progress(workload.num_prompts, "requests") as advance:
        result, answers = run_online(
            target, workload, params, rate=args.rate, concurrency=args.concurrency, advance=advance
        )
    how = f"{args.rate:g} requests/s" if args.rate else f"{args.concurrency or workload.num_prompts} concurrent"
    lines = [f"{args.url}: {workload.num_prompts} x {workload.input_len} -> {workload.output_len}, {how}"]
    lines += result.lines()
    if args.plot:
        done = [answer for answer in answers if answer.status == 200 and answer.times]
        lines += histogram([answer.times[0] - answer.sent for answer in done], "first token")
        lines += histogram([answer.end - answer.sent for answer in done], "whole request")
        if isinstance(args.plot, str):
            charts = [latency_chart({"first token": result.ttft_ms, "whole request": result.request_ms})]
            Path(args.plot).write_text(svg_charts(charts), encoding="utf-8")
    show("\n".join(lines), beside_json=args.json)
    if args.json:
        print(json.dumps({"workload": workload.summary(), "result": msgspec.to_builtins(result)}))
    if not result.statuses.get("200"):
        raise EngineDead(f"no request succeeded: {next((a.error for a in answers if a.error), result.statuses)}")
    return 0
