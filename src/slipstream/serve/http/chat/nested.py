"""Checks the fields of objects inside a request: messages, content parts, tools and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from slipstream.serve.http.errors import bad_request


def check_fields(
    given: Mapping[str, Any],
    path: str,
    known: Collection[str],
    neutral: Mapping[str, tuple[Any, ...]] | None = None,
) -> None:
    """Raises for a field that the object `path` does not have. Null is accepted under any name.

    `neutral`: fields of the API that are not supported, with the values that ask for nothing.
    """
    for field, value in given.items():
        if value is None or field in known:
            continue
        name = f"{path}.{field[:100]}"
        if neutral is None or field not in neutral:
            raise bad_request(f"there is no field {name}; remove it", name)
        if value not in neutral[field]:
            raise bad_request(f"{name} is not supported; remove it", name, "unsupported_parameter")
