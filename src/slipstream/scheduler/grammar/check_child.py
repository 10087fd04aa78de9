"""The child process of `GrammarChecker`: checks grammars from standard input until it is closed.

Compiling a hostile schema can take minutes and gigabytes, and a thread cannot be stopped. A process can. It is run as a
script with `python -I` and loads nothing but llguidance's extension module, whose file is its first argument: importing
the whole package would take 85 of 100 ms. The second is the limit of CPU seconds of a check, which ends the process.
"""

from __future__ import annotations

import resource
import signal
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec

HEADER = 4  # bytes of a message's length
MAX_MEMORY = 2**30  # bytes of address space beyond what the process has at its start


def main() -> None:
    loader = ExtensionFileLoader("llguidance._lib", sys.argv[1])
    library = loader.create_module(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(library)

    with open("/proc/self/statm", encoding="ascii") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + MAX_MEMORY, size + MAX_MEMORY))
    max_seconds = float(sys.argv[2])
    limits = library.LLParserLimits(verbose_errors=False)
    # single bytes: a matcher takes the time and memory that the grammar needs, whatever the vocabulary
    bytes_only = library.LLTokenizer("byte")
    source, target = sys.stdin.buffer, sys.stdout.buffer
    _send(target, b"")  # ready
    while header := source.read(HEADER):
        grammar = source.read(int.from_bytes(header, "little")).decode()
        signal.setitimer(signal.ITIMER_PROF, max_seconds)
        is_error, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        if not is_error:
            # its errors are not told: special tokens of the model are not in this vocabulary
            library.LLMatcher(bytes_only, grammar, log_level=0, limits=limits)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(target, messages[0].encode() if is_error else b"")


def _send(target: object, data: bytes) -> None:
    target.write(len(data).to_bytes(HEADER, "little") + data)  # type: ignore[attr-defined]
    target.flush()  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
