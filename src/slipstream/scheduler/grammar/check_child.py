"""Checks grammars in a child process, which is killed if it takes too long: compiling a hostile schema can take minutes
and gigabytes.

The child loads nothing but llguidance's extension module: importing the whole package would take 85 of 100 ms.
"""

from __future__ import annotations

import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec

from slipstream.base.processes import LimitedChild, answer_calls

MAX_SECONDS = 2.0  # of CPU time of one check


def new_checker() -> LimitedChild:
    """Its calls return what is wrong with a grammar of llguidance; an empty text if nothing is."""
    from llguidance import _lib  # takes 30 ms, at the first grammar

    return LimitedChild(__name__, str(_lib.__file__), max_seconds=MAX_SECONDS)


def main() -> None:
    loader = ExtensionFileLoader("llguidance._lib", sys.argv[3])
    library = loader.create_module(ModuleSpec(loader.name, loader, origin=loader.path))
    loader.exec_module(library)
    limits = library.LLParserLimits(verbose_errors=False)
    # single bytes: a matcher takes the time and memory that the grammar needs, whatever the vocabulary
    bytes_only = library.LLTokenizer("byte")

    def check(data: bytes) -> bytes:
        grammar = data.decode()
        is_error, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, limits=limits)
        if is_error:
            return messages[0].encode()  # type: ignore[no-any-return]
        # its errors are not told: special tokens of the model are not in this vocabulary
        library.LLMatcher(bytes_only, grammar, log_level=0, limits=limits)
        return b""

    answer_calls(check)


if __name__ == "__main__":
    main()
