"""`python -m slipstream.device.sync_check script.py arguments ...`: runs a program and reports where it waited."""

from __future__ import annotations

import os
import runpy
import sys

from slipstream.device.sync_check.watch import SyncLog, watch


def main(argv: list[str]) -> int:
    is_module = argv[:1] == ["-m"]
    names = argv[1:] if is_module else argv
    if not names or names[0] in ("-h", "--help"):
        sys.stderr.write("usage: python -m slipstream.device.sync_check [-m] script arguments ...\n")
        return 0 if names else 2
    if not is_module and not os.path.exists(names[0]):
        sys.stderr.write(f"there is no {names[0]} here; give a script, or -m and a module\n")
        return 2
    sys.argv = names
    log = SyncLog()
    try:
        with watch(log):
            if is_module:
                runpy.run_module(names[0], run_name="__main__", alter_sys=True)
            else:
                sys.path.insert(0, os.path.dirname(os.path.abspath(names[0])))  # the script may import its neighbours
                runpy.run_path(names[0], run_name="__main__")
    except SystemExit as end:  # exit with the program's own code
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:  # also if the program fails or is interrupted
        print_waits(log)
    return 0


def print_waits(log: SyncLog) -> None:
    found = sorted(log.found, key=lambda sync: -sync.seconds)
    seconds = sum(sync.seconds for sync in found)
    times = sum(sync.count for sync in found)
    sys.stderr.write(f"the host waited {times} times in {len(found)} calls, {1000 * seconds:.1f} ms\n")
    for sync in [*found, *log.allowed]:
        sys.stderr.write(f"{sync}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
