"""ResponseStore: responses and their conversations in the memory of one front end, the least recently used dropped.

They are kept as JSON, whose size is that of the memory: small objects take ten times the bytes of their JSON.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec


class StoredResponse(msgspec.Struct):
    owner: str  # the API key's digest
    body: bytes  # the response, as JSON
    messages: bytes  # of the conversation so far, the answer included, as JSON
    items: bytes  # the input of the request, as JSON

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages) + len(self.items)


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def add(self, id: str, response: StoredResponse) -> None:
        """Stores a response under a new id. One that is larger than the limit is dropped at once."""
        assert id not in self._stored, f"a second response with the id {id}"
        self._stored[id] = response
        self.num_bytes += response.size
        while self._stored and (self.num_bytes > self._max_bytes or len(self._stored) > self._max_count):
            _, dropped = self._stored.popitem(last=False)
            self.num_bytes -= dropped.size

    def find(self, owner: str, id: str) -> StoredResponse | None:
        found = self._stored.get(id)
        if found is None or found.owner != owner:
            return None
        self._stored.move_to_end(id)
        return found

    def delete(self, owner: str, id: str) -> bool:
        if self.find(owner, id) is None:
            return False
        self.num_bytes -= self._stored.pop(id).size
        return True

    def __len__(self) -> int:
        return len(self._stored)
