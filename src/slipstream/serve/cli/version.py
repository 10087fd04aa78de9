"""`slipstream version`: shows installed versions, from package metadata, without importing torch."""

from __future__ import annotations

import argparse
import platform
from typing import TYPE_CHECKING

import slipstream

if TYPE_CHECKING:
    from slipstream.serve.cli.run import OpenLLM

PACKAGES = ("torch", "triton", "numpy", "tokenizers", "safetensors", "gguf")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "version", help="show versions", description="Shows the versions of Slipstream, Python and its packages."
    )
    command.set_defaults(run=run)


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    print(slipstream_line())
    print(f"python {platform.python_version()}")
    print(f"platform {platform.platform()}")
    for name in PACKAGES:
        print(f"{name} {installed(name) or 'not installed'}")
    return 0


def slipstream_line() -> str:
    return f"slipstream {slipstream.__version__}"


def installed(name: str) -> str | None:
    """Returns the version of a package without importing it."""
    from importlib import metadata  # slow to import, and only needed here

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
