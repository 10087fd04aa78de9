"""FrontEndArgs: arguments of `LLM` and `AsyncEngine` that concern only the front end; the server has flags for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.frontend.served import ServedModel
from slipstream.frontend.structured_config import StructuredOutputsConfig, read_structured_config
from slipstream.parsers.families import check_parsers


class ProfilerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of vLLM's ProfilerConfig that is supported."""

    profiler: Literal["torch"]
    torch_profiler_dir: str
    torch_profiler_with_stack: bool = True
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False


def read_profiler_config(given: object) -> ProfilerConfig | None:
    """From an object or its JSON; None for one that configures nothing."""
    try:
        if isinstance(given, str | bytes):
            given = msgspec.json.decode(given)
        return None if given == {} else msgspec.convert(given, ProfilerConfig)
    except msgspec.MsgspecError as error:
        fields = ", ".join(ProfilerConfig.__struct_fields__)
        raise InvalidOption(f"profiler_config: {error}; give profiler torch and {fields}") from None


class FrontEndArgs(msgspec.Struct, frozen=True):
    max_logprobs: int | None = None  # limit of logprobs and prompt_logprobs of a request; None or -1: none
    disable_log_stats: bool | None = True  # no statistics of requests, for `LLM.get_metrics`; an AsyncEngine has them
    profiler_config: ProfilerConfig | None = None  # for `LLM.start_profile`
    structured_outputs_config: StructuredOutputsConfig | None = None  # defaults of structured output
    reasoning_parser: str | None = None  # how models mark reasoning, for thinking budgets; None: by the chat template

    @classmethod
    def take(cls, options: dict[str, Any]) -> FrontEndArgs:
        """Removes these arguments from the options, and checks them."""
        given = {name: options.pop(name) for name in cls.__struct_fields__ if name in options}
        if given.get("profiler_config") is not None:
            given["profiler_config"] = read_profiler_config(given["profiler_config"])
        if given.get("structured_outputs_config") is not None:
            config = given["structured_outputs_config"] = read_structured_config(given["structured_outputs_config"])
            given["reasoning_parser"] = given.get("reasoning_parser") or config.reasoning_parser
        found = cls(**given)
        limit = found.max_logprobs
        if limit is not None and (type(limit) is not int or limit < -1):
            raise InvalidOption(f"max_logprobs is {limit!r:.50}; give a number from 0 up, or -1 for no limit")
        if not isinstance(found.reasoning_parser, str | None):
            raise InvalidOption(f"reasoning_parser is {found.reasoning_parser!r:.50}; give the name of a parser")
        if found.reasoning_parser:
            check_parsers(found.reasoning_parser, None)
        return found

    def check_async(self) -> None:
        """Raises for arguments that only `LLM` has."""
        if self.profiler_config is not None:
            raise InvalidOption("profiler_config is for LLM.start_profile; use torch.profiler around the engine")

    def apply(self, models: Iterable[ServedModel]) -> None:
        for model in models:
            model.inputs.checks.max_logprobs = None if self.max_logprobs == -1 else self.max_logprobs
            model.inputs.checks.structured_config = self.structured_outputs_config
            model.inputs.reasoning_parser = self.reasoning_parser or None
