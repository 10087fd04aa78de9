"""The output of /v1/responses: items of an answer, and the events of a stream."""

from __future__ import annotations

from typing import Any

from slipstream.serve.http.chat.blocks import Block, BlockDelta, BlockEvent, BlockKind, BlockStart
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.response import named_event
from slipstream.serve.http.responses.types import ResponsesContent, ResponsesItem

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}


class ResponseItems:
    """Makes items of blocks; the ids of a response's items have its id."""

    def __init__(self, id: str) -> None:
        self._id = id

    def item(self, block: Block, status: str) -> ResponsesItem:
        id = f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"
        if block.kind == "call":
            return ResponsesItem(id, "function_call", status, call_id=block.id, name=block.name, arguments=block.text)
        if block.kind == "reasoning":
            content = [_part("reasoning", block.text)] if block.text else []
            return ResponsesItem(id, "reasoning", status, summary=[], content=content)
        content = [_part("text", block.text)] if block.text else []
        return ResponsesItem(id, "message", status, role="assistant", content=content)


def _part(kind: BlockKind, text: str) -> ResponsesContent:
    if kind == "reasoning":
        return ResponsesContent("reasoning_text", text)
    return ResponsesContent("output_text", text, annotations=[], logprobs=[])


class ResponseEvents:
    """Writes the events of one stream, which are numbered."""

    def __init__(self, items: ResponseItems) -> None:
        self._items = items
        self._number = 0

    def failed(self, error: HTTPException) -> bytes:
        return self.event("error", message=error.message, code=error.code, param=error.param)

    def event(self, kind: str, **fields: Any) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return named_event(kind, numbered)

    def of_block(self, event: BlockEvent, status: str = "completed") -> bytes:
        """`status`: of a block that ends here."""
        block = event.block
        item = self._items.item(Block(block.kind, block.index, "", block.name, block.id), "in_progress")
        ids: dict[str, Any] = {"item_id": item.id, "output_index": block.index}
        if isinstance(event, BlockStart):
            return self._start(block, item, ids)
        if isinstance(event, BlockDelta):
            kind = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}[block.kind]
            if block.kind != "call":
                ids["content_index"] = 0
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            return self.event(f"response.{kind}.delta", **ids, delta=event.text, **more)
        return self._end(block, ids, status)

    def _start(self, block: Block, item: ResponsesItem, ids: dict[str, Any]) -> bytes:
        begun = self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind == "call":
            return begun
        part = _part(block.kind, "")
        return begun + self.event("response.content_part.added", **ids, content_index=0, part=part)

    def _end(self, block: Block, ids: dict[str, Any], status: str) -> bytes:
        whole = self._items.item(block, status)
        if block.kind == "call":
            name = "response.function_call_arguments.done"
            ended = self.event(name, **ids, name=block.name, arguments=block.text)
        else:
            name = f"response.{'output' if block.kind == 'text' else 'reasoning'}_text.done"
            more: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
            ended = self.event(name, **ids, content_index=0, text=block.text, **more)
            part = _part(block.kind, block.text)
            ended += self.event("response.content_part.done", **ids, content_index=0, part=part)
        return ended + self.event("response.output_item.done", output_index=block.index, item=whole)
