"""Messages of a chat request: text alone, whole or in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.serve.http.call import Call
from slipstream.serve.http.errors import bad_request


def text_messages(call: Call, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same messages, checked for what only a server meets; templates check the rest."""
    if not messages:
        raise bad_request("there are no messages; give at least one", "messages")
    call.check_count(len(messages), "messages")
    for place, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
            if kind != "text" and not isinstance(part, str):
                raise bad_request(
                    f"message {place} holds a part of type {kind!r}; models read text alone, nothing is fetched",
                    f"messages[{place}].content",
                    "unsupported_content",
                )
    return list(messages)


def message_chars(messages: Sequence[dict[str, Any]]) -> int:
    """About how long the prompt will be."""
    total = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            total += len(content)
        elif isinstance(content, list):
            total += sum(len(part.get("text") or "") for part in content if isinstance(part, dict))
    return total
