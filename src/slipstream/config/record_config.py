"""RecordConfig: the settings of the flight recorder, and their checks."""

from __future__ import annotations

import msgspec

from slipstream.config.options import Options
from slipstream.errors import InvalidOption

MAX_STEPS = 1 << 20


class RecordConfig(msgspec.Struct, frozen=True):
    num_steps: int = 256  # kept in memory; 0: nothing is recorded
    folder: str | None = None  # of the files written after a failure; None: a folder of this user for temporary files
    redact: bool = False  # files have no token ids and no text of requests
    every_mb: int = 0  # a file is written each time so many megabytes were recorded; 0: only after a failure


def resolve_record(options: Options) -> RecordConfig:
    if not 0 <= options.record_steps <= MAX_STEPS:
        raise InvalidOption(
            f"record_steps is {options.record_steps}; give a number from 0 (nothing is recorded) to {MAX_STEPS}"
        )
    every = options.record_every_mb
    if every < 0 or (every and not options.record_steps):
        fact = "below 0" if every < 0 else "set, and record_steps is 0"
        raise InvalidOption(f"record_every_mb is {every}, {fact}; give a number of megabytes, and record_steps above 0")
    if not options.record_steps and (options.record_dir is not None or options.record_redact):
        name = "record_redact" if options.record_dir is None else "record_dir"
        raise InvalidOption(f"{name} is given and record_steps is 0, so nothing is recorded; remove one of them")
    return RecordConfig(options.record_steps, options.record_dir, options.record_redact, every)
