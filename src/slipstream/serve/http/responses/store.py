"""ResponseStore: responses and their conversations, in an SQLite database that all front ends share.

The database is in memory: of this process with one front end, else a file in a folder of shared memory. Over a limit,
the least recently used response of the caller that has most is dropped, so one caller cannot drop those of others.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from slipstream.base.files import locked

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, owner TEXT, used INT, size INT, body BLOB, messages BLOB, items BLOB) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_owner ON responses (owner, used, size);
CREATE INDEX IF NOT EXISTS by_use ON responses (used);
"""


class StoredResponse(msgspec.Struct):
    owner: str  # the API key's digest
    body: bytes  # the response, as JSON
    messages: bytes  # of the conversation so far, the answer included, as JSON
    items: bytes  # the input of the request, as JSON

    @property
    def size(self) -> int:
        return len(self.body) + len(self.messages) + len(self.items)


class ResponseStore:
    def __init__(self, max_count: int, max_bytes: int, path: Path | None = None) -> None:
        """`path`: of the database that several front ends share."""
        self._max_count = max_count
        self._max_bytes = max_bytes
        if path is None:
            self._open(":memory:")
            return
        # SQLite does not wait for a process that sets WAL at the same time: the database is locked
        with locked(path.with_suffix(".lock")):
            self._open(path)

    def _open(self, where: Path | str) -> None:
        self._db = sqlite3.connect(where, check_same_thread=False, isolation_level=None, timeout=30)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = OFF")  # it need not survive the machine
        self._db.executescript(_SCHEMA)

    def add(self, id: str, response: StoredResponse) -> None:
        """Stores a response under a new id. One that is larger than the limit is not stored."""
        if response.size > self._max_bytes or self._max_count < 1:
            return
        with self._change():
            row = (id, response.owner, response.size, response.body, response.messages, response.items)
            values = f"?, ?, {_NEXT_USE}, ?, ?, ?, ?"
            self._db.execute(f"INSERT INTO responses VALUES ({values})", row)
            while (most := self._over_limit()) is not None:
                oldest = f"SELECT id FROM responses WHERE owner = ({most}) ORDER BY used LIMIT 1"
                self._db.execute(f"DELETE FROM responses WHERE id = ({oldest})")

    def find(self, owner: str, id: str) -> StoredResponse | None:
        with self._change():
            query = "SELECT owner, body, messages, items FROM responses WHERE id = ? AND owner = ?"
            row = self._db.execute(query, (id, owner)).fetchone()
            if row is not None:
                self._db.execute(f"UPDATE responses SET used = {_NEXT_USE} WHERE id = ?", (id,))
        return None if row is None else StoredResponse(*row)

    def delete(self, owner: str, id: str) -> bool:
        with self._change():
            return self._db.execute("DELETE FROM responses WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0

    def close(self) -> None:
        self._db.close()

    @property
    def num_bytes(self) -> int:
        (total,) = self._db.execute("SELECT TOTAL(size) FROM responses").fetchone()
        return int(total)

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM responses").fetchone()
        return int(count)

    def _over_limit(self) -> str | None:
        """The query for the owner that has most of what is over its limit; None where both limits are kept."""
        for limit, used, measure in (
            (self._max_bytes, self.num_bytes, "SUM(size)"),
            (self._max_count, len(self), "COUNT(*)"),
        ):
            if used > limit:
                return f"SELECT owner FROM responses GROUP BY owner ORDER BY {measure} DESC LIMIT 1"
        return None

    @contextmanager
    def _change(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


_NEXT_USE = "(SELECT IFNULL(MAX(used), 0) + 1 FROM responses)"
