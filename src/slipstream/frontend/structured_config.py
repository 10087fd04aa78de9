"""StructuredOutputsConfig: vLLM's structured_outputs_config, the defaults of structured output for all requests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from slipstream.base.errors import InvalidOption
from slipstream.params.sampling import SamplingParams


class StructuredOutputsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # any of vLLM's: llguidance compiles all grammars
    backend: Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"] = "auto"
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: Literal[""] = ""
    enable_in_reasoning: Literal[False] = False

    def with_defaults(self, params: SamplingParams) -> SamplingParams:
        """The parameters of a request, with these defaults for its JSON schema."""
        wanted = params.structured_outputs
        names = [name for name in ("disable_any_whitespace", "disable_additional_properties") if getattr(self, name)]
        if wanted is None or not (wanted.json or wanted.json_object):
            return params
        changes: dict[str, Any] = dict.fromkeys(names, True)
        if self.backend == "outlines" and not self.disable_any_whitespace and wanted.whitespace_pattern is None:
            changes["whitespace_pattern"] = "[ ]?"  # of outlines: no line breaks
        if not changes:
            return params
        return params.with_changes(structured_outputs=msgspec.structs.replace(wanted, **changes))


def read_structured_config(given: object) -> StructuredOutputsConfig:
    """From an object with these fields, a mapping or its JSON."""
    try:
        if isinstance(given, str | bytes):
            given = msgspec.json.decode(given)
        elif isinstance(given, StructuredOutputsConfig):
            given = msgspec.structs.asdict(given)  # and check the values
        fields: Any = given if isinstance(given, Mapping) else vars(given)
        return msgspec.convert(dict(fields), StructuredOutputsConfig)
    except (msgspec.MsgspecError, TypeError) as error:
        known = ", ".join(StructuredOutputsConfig.__struct_fields__)
        raise InvalidOption(f"structured_outputs_config: {error}; it has {known}") from None
