"""FrontEndArgs: arguments of `LLM` and `AsyncEngine` that concern only the front end; the server has flags for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from slipstream.errors import InvalidOption
from slipstream.frontend.served import ServedModel
from slipstream.parsers.families import check_parsers


class FrontEndArgs(msgspec.Struct, frozen=True):
    max_logprobs: int | None = None  # limit of logprobs and prompt_logprobs of a request; None or -1: none
    reasoning_parser: str | None = None  # how models mark reasoning, for thinking budgets; None: by the chat template

    @classmethod
    def take(cls, options: dict[str, Any]) -> FrontEndArgs:
        """Removes these arguments from the options, and checks them."""
        given = {name: options.pop(name) for name in cls.__struct_fields__ if name in options}
        found = cls(**given)
        limit = found.max_logprobs
        if limit is not None and (type(limit) is not int or limit < -1):
            raise InvalidOption(f"max_logprobs is {limit!r:.50}; give a number from 0 up, or -1 for no limit")
        if not isinstance(found.reasoning_parser, str | None):
            raise InvalidOption(f"reasoning_parser is {found.reasoning_parser!r:.50}; give the name of a parser")
        if found.reasoning_parser:
            check_parsers(found.reasoning_parser, None)
        return found

    def apply(self, models: Iterable[ServedModel]) -> None:
        for model in models:
            model.inputs.max_logprobs = None if self.max_logprobs == -1 else self.max_logprobs
            model.inputs.reasoning_parser = self.reasoning_parser or None
