"""`slipstream replay`: checks a recording of the flight recorder, and runs its plans again."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from slipstream.base.errors import SlipstreamError, UserError
from slipstream.checkpoint.locate import locate
from slipstream.serve.cli.run import OpenLLM

if TYPE_CHECKING:
    from slipstream.config.config import EngineConfig
    from slipstream.record.record_file import Recording
    from slipstream.record.replay import ReplayResult


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "replay",
        help="check a recording of the last steps, and run it again",
        description="Checks the plans of a recording for faults of the scheduler, then runs them again on the model "
        "and compares the tokens. Exit code 1: a fault, a difference or an error was found.",
        usage="slipstream replay FILE [flags]",
        allow_abbrev=False,
    )
    command.add_argument("file", metavar="FILE", help="a recording: from /debug/record, LLM.save_record or a failure")
    command.add_argument("--model", help="the model's folder, file or name on this machine; default: the recording's")
    command.add_argument(
        "--lora-modules",
        action="append",
        metavar="NAME=FOLDER",
        help="where a LoRA adapter is on this machine, once per adapter; default: the recording's folders",
    )
    command.add_argument("--check-only", action="store_true", help="check the plans only; needs no model")
    command.add_argument("--redact", metavar="OUT", help="write the recording without token ids and texts, and stop")
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    try:
        return _run(args)
    except (SlipstreamError, OSError):
        raise
    except Exception as error:  # damage is found by the checksum of a file; this one has values that no recorder writes
        fact = f"{args.file} cannot be replayed: {type(error).__name__}: {error}"
        raise UserError(f"{fact}; record it again with this version") from error


def _run(args: argparse.Namespace) -> int:
    from slipstream.config.adapter_config import read_lora_modules
    from slipstream.record.record_file import decode, fingerprint, write_private
    from slipstream.record.replay import ReplayedAdapters, replay

    recording = decode(_read(args.file), args.file)
    if args.redact is not None:
        write_private(Path(args.redact), recording.encode(redact=True))
        return 0
    if not args.json:
        _describe(recording)
    if args.check_only:
        return _finish(args, replay(recording))
    folders = {each.lora_name: each.lora_path for each in read_lora_modules(args.lora_modules)}
    config = _replay_config(recording, args.model)
    if recording.exchanged:
        raise UserError(
            "the weights were exchanged before the first recorded step, and are in no file; use --check-only"
        )
    if config.model.load_format != "dummy" and not Path(config.model.path).exists():
        raise UserError(f"the model {config.model.path} is not on this machine; give --model, or --check-only")
    if (found := fingerprint(config)) != recording.fingerprint:
        raise UserError(f"the weights in {config.model.path} are others ({found}, not {recording.fingerprint})")
    from slipstream.ranks.start import build_ranks  # imports torch

    half = build_ranks(config)
    try:
        adapters = None if half.adapters is None else ReplayedAdapters(half.adapters, folders)
        return _finish(args, replay(recording, half.executor, adapters))
    finally:
        half.executor.close()


def _replay_config(recording: Recording, model: str | None) -> EngineConfig:
    """The configuration of the recording, for this machine.

    The cache has the recorded number of pages, whatever memory is free. No pages are exchanged. Engines that share
    experts have a recording each; its plans run on one engine with all experts.
    """
    config = recording.config
    path = config.model.path if model is None else str(locate(model, None, "auto").path)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=path, num_engines=1, engine=0),
        device=msgspec.structs.replace(config.device, keep_free=None),
        cache=msgspec.structs.replace(config.cache, is_mirrored=False),
        transfer=None,
    )


def _read(name: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror}") from None


def _describe(recording: Recording) -> None:
    model, steps = recording.config.model, recording.steps
    print(f"{model.name}, {model.dtype} on {recording.config.device.kind}; slipstream {recording.slipstream}")
    print(recording.machine)
    if steps:
        rows = sum(len(step.plan.rows) for step in steps) / len(steps)
        before = len(recording.generated) + len(recording.pooled)
        print(f"steps {steps[0].plan.step} to {steps[-1].plan.step}, {rows:.1f} rows each; {before} rows from before")
    if recording.redacted:
        print("redacted: without token ids; tokens are not compared")
    if recording.failure:
        print(f"the engine failed: {recording.failure}")


def _finish(args: argparse.Namespace, result: ReplayResult) -> int:
    if args.json:
        print(msgspec.json.encode(result).decode())
    else:
        print(f"{result.num_steps} steps checked")
        if not args.check_only:
            skipped = f", {result.num_skipped} of rows from before not compared" if result.num_skipped else ""
            print(f"{result.num_compared} results compared{skipped}")
        for what, fact in (("fault", result.fault), ("difference", result.difference), ("error", result.error)):
            if fact is not None:
                print(f"{what}: {fact}")
        if not (result.fault or result.difference or result.error):
            print("no difference")
    return 1 if result.fault or result.difference or result.error else 0
