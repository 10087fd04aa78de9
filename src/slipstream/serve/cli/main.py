"""The `slipstream` command.

It imports next to nothing: `slipstream serve` handles signals before the slow imports, which are in `commands.py`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slipstream.serve.signals import record_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

    from slipstream.serve.cli.run import OpenLLM


def main(argv: Sequence[str] | None = None, opener: OpenLLM | None = None) -> int:
    """Runs one command and returns its exit code. Without `argv` it is the process of this command. `opener` creates
    the LLM; tests replace it."""
    if argv is None and sys.argv[1:2] == ["serve"]:
        record_signals()
    from slipstream.serve.cli.commands import run_command

    return run_command(sys.argv[1:] if argv is None else argv, opener)


if __name__ == "__main__":
    sys.exit(main())
