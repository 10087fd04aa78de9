"""BatchStore: files and batches in an SQLite database, bounded in bytes and in number, with an equal share per owner.

Every change is one transaction, so that a server that was killed continues with the last finished one. Several front
ends may have the database open. The database has no API keys: an owner is a keyed hash of one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from slipstream.base.errors import InvalidOption, UserError
from slipstream.base.files import locked
from slipstream.base.typed import Fields
from slipstream.serve.http.server.batch_lines import BatchLineError
from slipstream.serve.http.server.errors import HTTPException
from slipstream.serve.http.server.settings import ServerSettings

KEEP_SECONDS = 30 * 86400  # for which files and finished batches are kept
_MAX_ROWS = 10_000  # files, and batches
MAX_RESULT_BYTES = 2**29  # of one batch: its files are written at once, and SQLite takes 10**9 bytes in one value

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, size INT, expires INT, state BLOB, data BLOB);
CREATE TABLE IF NOT EXISTS batches (
    number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, open INT, expires INT, result_bytes INT,
    state BLOB);
CREATE TABLE IF NOT EXISTS results (batch TEXT, line_index INT, ok INT, line BLOB, PRIMARY KEY (batch, line_index));
CREATE TABLE IF NOT EXISTS salt (salt BLOB);
"""


T = TypeVar("T")


class StoreFull(UserError):
    """The store has no room for a file, a batch or a result."""


class StoreDamaged(sqlite3.DatabaseError):
    """The database has what the store did not write."""


REPAIR = "end the server, then restore the file from a backup, repair it (sqlite3 has .recover), or move it away"
"""What to do about a damaged database."""


def is_damage(error: Exception) -> bool:
    """Whether the database must be repaired, and trying again does not help."""
    if isinstance(error, StoreDamaged | UnicodeDecodeError) or "Could not decode to UTF-8" in str(error):
        return True  # some messages of SQLite quote damaged text, which Python then cannot decode
    return error_code(error) in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)


class BatchStore:
    """All methods block, and are called by one thread at a time."""

    def __init__(self, folder: str, max_bytes: int, num_owners: int = 1) -> None:
        """`num_owners`: API keys, each of which has an equal share of the limits."""
        self.folder = Path(folder)
        self.max_bytes = max_bytes
        self.num_owners = num_owners
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self.folder / "open.lock"):  # two processes do not set WAL at once
                self._open()
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:
            if is_damage(error):
                raise InvalidOption(f"{self.path} is damaged: {error}; {REPAIR}, or give another batch_dir") from None
            raise InvalidOption(f"cannot open the batch store in {folder}: {error}; give another batch_dir") from None

    @property
    def path(self) -> Path:
        return self.folder / "batches.sqlite"

    def _open(self) -> None:
        self._db = sqlite3.connect(self.path, check_same_thread=False, isolation_level=None, timeout=30)
        os.chmod(self.path, 0o600)
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")  # a killed process loses nothing; a power failure may
        self._db.executescript(_SCHEMA)
        with self._change():
            found = self._db.execute("SELECT salt FROM salt").fetchone()
            if found is None and self._db.execute("SELECT id FROM files UNION SELECT id FROM batches").fetchone():
                raise StoreDamaged("it has files, but not the salt of their owners")
            if found is None:
                found = (secrets.token_bytes(16),)
                self._db.execute("INSERT INTO salt VALUES (?)", found)
        self._salt = _bytes(found[0], "the salt of the owners")
        if len(self._salt) != 16:
            raise StoreDamaged(f"the salt of the owners has {len(self._salt)} bytes, not 16")

    def close(self) -> None:
        self._db.close()

    def owner(self, key: bytes) -> str:
        """The name under which the files of this API key are stored."""
        return hashlib.blake2b(key, key=self._salt, digest_size=16).hexdigest()

    # Files

    def add_file(self, owner: str, filename: str, purpose: str, data: bytes, seconds: int) -> FileObject:
        """Stores a file for this many seconds. Raises StoreFull."""
        with self._change():
            self._check_room(owner, len(data))
            return self._insert_file(owner, filename, purpose, data, seconds)

    def file(self, owner: str, id: str) -> FileObject | None:
        query = "SELECT state FROM files WHERE id = ? AND owner = ? AND expires > ?"
        found = self._db.execute(query, (id, owner, time.time())).fetchone()
        return None if found is None else _decode(found[0], FileObject)

    def content(self, owner: str, id: str) -> bytes | None:
        query = "SELECT data, state FROM files WHERE id = ? AND owner = ? AND expires > ?"
        found = self._db.execute(query, (id, owner, time.time())).fetchone()
        if found is None:
            return None
        data, file = _bytes(found[0], f"the file {id}"), _decode(found[1], FileObject)
        if len(data) != file.bytes:
            raise StoreDamaged(f"the file {id} has {len(data)} bytes, not {file.bytes}")
        return data

    def files(
        self, owner: str, after: str | None, limit: int, newest_first: bool, purpose: str | None = None
    ) -> list[FileObject]:
        """Returns up to `limit` files, with this purpose if one is given, behind the one with the id `after`."""
        rows = self._page("files", owner, after, limit if purpose is None else _MAX_ROWS, newest_first)
        files = (_decode(row, FileObject) for row in rows)
        return list(islice((file for file in files if purpose in (None, file.purpose)), limit))

    def delete_file(self, owner: str, id: str) -> bool:
        with self._change():
            return self._db.execute("DELETE FROM files WHERE id = ? AND owner = ?", (id, owner)).rowcount > 0

    # Batches

    def add_batch(self, owner: str, batch: BatchObject) -> None:
        """Raises StoreFull."""
        with self._change():
            self._check_room(owner, 0)
            row = (batch.id, owner, 1, batch.created_at + KEEP_SECONDS, 0, msgspec.json.encode(batch))
            self._db.execute(
                "INSERT INTO batches (id, owner, open, expires, result_bytes, state) VALUES (?, ?, ?, ?, ?, ?)", row
            )

    def batch(self, owner: str, id: str) -> BatchObject | None:
        found = self._db.execute("SELECT state FROM batches WHERE id = ? AND owner = ?", (id, owner)).fetchone()
        return None if found is None else _decode(found[0], BatchObject)

    def open_batch(self, owner: str, id: str) -> BatchObject:
        """Returns one of `open_batches`."""
        batch = self.batch(owner, id)
        if batch is None or batch.status not in OPEN:
            state = "not found" if batch is None else batch.status
            raise StoreDamaged(f"the batch {id} is {state}, and among those that are not finished")
        return batch

    def batches(self, owner: str, after: str | None, limit: int) -> list[BatchObject]:
        return [_decode(row, BatchObject) for row in self._page("batches", owner, after, limit, True)]

    def open_batches(self) -> list[tuple[str, str]]:
        """Returns owners and ids of the batches that are not finished, the oldest first."""
        return self._db.execute("SELECT owner, id FROM batches WHERE open ORDER BY number").fetchall()

    def change_batch(self, owner: str, id: str, change: Callable[[BatchObject], None]) -> BatchObject | None:
        """Applies a change to the stored batch, and returns it."""
        with self._change():
            batch = self.batch(owner, id)
            if batch is not None:
                change(batch)
                self._put(batch)
            return batch

    # Results

    def add_result(self, owner: str, id: str, line_index: int, line: bytes, ok: bool) -> None:
        """Stores the result of a line; a second one of the same line is dropped. Raises StoreFull."""
        with self._change():
            self._check_room(owner, len(line), rows=False)
            self._check_results(id, len(line))
            entry = (id, line_index, ok, line)
            if self._db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)", entry).rowcount:
                self._db.execute("UPDATE batches SET result_bytes = result_bytes + ? WHERE id = ?", (len(line), id))
                batch = self.open_batch(owner, id)
                batch.request_counts.completed += ok
                batch.request_counts.failed += not ok
                self._put(batch)

    def line_indices(self, id: str) -> set[int]:
        """Indices of the lines with a result."""
        return {
            line_index for (line_index,) in self._db.execute("SELECT line_index FROM results WHERE batch = ?", (id,))
        }

    def finish(self, owner: str, id: str, change: Callable[[BatchObject], None], rest: bytes = b"") -> None:
        """Makes files of the results, in the order of the input, and closes the batch. `rest`: lines to append to the
        file of errors."""
        with self._change():
            batch = self.open_batch(owner, id)
            kept = batch.output_expires_after
            seconds = KEEP_SECONDS if kept is None else kept.seconds
            for ok in (1, 0):
                query = "SELECT line FROM results WHERE batch = ? AND ok = ? ORDER BY line_index"
                found = (_bytes(line, f"a result of {id}") for (line,) in self._db.execute(query, (id, ok)))
                data = b"".join(line + b"\n" for line in found) + (b"" if ok else rest)
                if data:
                    name = f"{id}_{'output' if ok else 'error'}.jsonl"
                    file = self._insert_file(owner, name, "batch_output", data, seconds)
                    if ok:
                        batch.output_file_id = file.id
                    else:
                        batch.error_file_id = file.id
            change(batch)
            assert batch.status not in OPEN
            self._db.execute("DELETE FROM results WHERE batch = ?", (id,))
            self._db.execute("UPDATE batches SET open = 0, result_bytes = 0 WHERE id = ?", (id,))
            self._put(batch)

    def delete_expired(self) -> None:
        with self._change():
            now = time.time()
            self._db.execute("DELETE FROM files WHERE expires <= ?", (now,))
            self._db.execute("DELETE FROM batches WHERE expires <= ? AND NOT open", (now,))

    # Helpers

    def _insert_file(self, owner: str, filename: str, purpose: str, data: bytes, seconds: int) -> FileObject:
        now = int(time.time())
        file = FileObject(f"file-{secrets.token_hex(12)}", len(data), now, filename, purpose, now + seconds)
        row = (file.id, owner, len(data), file.expires_at, msgspec.json.encode(file), data)
        self._db.execute("INSERT INTO files (id, owner, size, expires, state, data) VALUES (?, ?, ?, ?, ?, ?)", row)
        return file

    def _put(self, batch: BatchObject) -> None:
        self._db.execute("UPDATE batches SET state = ? WHERE id = ?", (msgspec.json.encode(batch), batch.id))

    def _page(self, table: str, owner: str, after: str | None, limit: int, newest_first: bool) -> Iterator[bytes]:
        compare, order = ("<", "DESC") if newest_first else (">", "ASC")
        query, values = f"SELECT state FROM {table} WHERE owner = ?", [owner]
        if table == "files":
            query, values = query + " AND expires > ?", [*values, str(int(time.time()))]
        if after is not None:
            found = self._db.execute(
                f"SELECT number FROM {table} WHERE id = ? AND owner = ?", (after, owner)
            ).fetchone()
            if found is None:  # perhaps it was deleted while the client read the page before
                fact = f"after is {after[:100]!r}, which is the id of none of your {table}"
                raise UserError(f"{fact}; give another, or remove it", param="after")
            query += f" AND number {compare} {found[0]}"
        rows = self._db.execute(f"{query} ORDER BY number {order} LIMIT {limit}", values)
        return (row for (row,) in rows.fetchall())

    def _check_room(self, owner: str, num_bytes: int, *, rows: bool = True) -> None:
        """Raises if the owner's share has no room for this many bytes and, with `rows`, for a file or batch."""
        mine = "WHERE owner = :owner"
        count = f"(SELECT COUNT(*) FROM files {mine}), (SELECT COUNT(*) FROM batches {mine})"
        total = f"(SELECT TOTAL(size) FROM files {mine}) + (SELECT TOTAL(result_bytes) FROM batches {mine})"
        num_files, num_batches, used = self._db.execute(f"SELECT {count}, {total}", {"owner": owner}).fetchone()
        share, max_rows = self.max_bytes // self.num_owners, max(1, _MAX_ROWS // self.num_owners)
        each = f" for each of {self.num_owners} API keys" if self.num_owners > 1 else ""
        if used + num_bytes > share:
            fact = f"the store has {int(used)} bytes, and {num_bytes} more exceed the limit of {share} bytes{each}"
            raise StoreFull(f"{fact}; delete files, or raise --max-store-bytes")
        if rows and max(num_files, num_batches) >= max_rows:
            fact = f"the store has {num_files} files and {num_batches} batches, the limit is {max_rows} each{each}"
            raise StoreFull(f"{fact}; delete files, or wait until batches expire")

    def _check_results(self, id: str, num_bytes: int) -> None:
        (used,) = self._db.execute("SELECT TOTAL(result_bytes) FROM batches WHERE id = ?", (id,)).fetchone()
        if used + num_bytes > MAX_RESULT_BYTES:
            limit = f"{num_bytes} more exceed the limit of {MAX_RESULT_BYTES}"
            raise StoreFull(
                f"the batch has {int(used)} bytes of results, and {limit}; send the other lines in another batch"
            )

    @contextmanager
    def _change(self) -> Iterator[None]:
        """One transaction. It locks the database at once, so that reads within it are current. Raises StoreFull where
        the disk is full."""
        try:
            with transaction(self._db):
                yield
        except sqlite3.Error as error:
            if error_code(error) == sqlite3.SQLITE_FULL:
                raise StoreFull("the disk of the batch store is full; free space on it") from None
            raise


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """A transaction that may write, of a connection in autocommit mode. It ends also where COMMIT fails."""
    try:
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # some errors of SQLite have ended it
            db.execute("ROLLBACK")
        raise


def error_code(error: BaseException) -> int:
    """SQLite's code without its extension; 0 if the error is not SQLite's."""
    code: int = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF


def _bytes(found: object, name: str) -> bytes:
    if not isinstance(found, bytes):
        raise StoreDamaged(f"{name} is {type(found).__name__}, not bytes")
    return found


def _decode(state: object, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(_bytes(state, f"a {kind.__name__}"), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StoreDamaged(f"a {kind.__name__} cannot be read: {error}") from None


# OpenAI's objects of files and batches.

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that is not finished; the others are completed, failed, expired and cancelled."""


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class BatchErrors(msgspec.Struct):
    data: list[BatchLineError]
    object: str = "list"


class ExpiresAfter(Fields):
    anchor: str
    seconds: int


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None  # as requested; not a field of OpenAI's


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"


# BatchService: the store of files and batches for the routes of one front end, whose calls run in a thread.

P = ParamSpec("P")

log = logging.getLogger("slipstream.http")


class StoreUnavailable(HTTPException):
    """The database is locked by another process, is damaged, or cannot be read or written."""

    def __init__(self, store: BatchStore, error: Exception) -> None:
        if is_damage(error):
            fact, after = f"the batch store is damaged: {error}; {REPAIR}: {store.path.name} in the batch_dir", None
        else:
            fact, after = f"the batch store cannot be used: {error}; try again", 5
        super().__init__(503, fact, code="store_unavailable", retry_after=after)


class BatchService:
    def __init__(self, settings: ServerSettings) -> None:
        assert settings.batch_dir is not None
        self.store = BatchStore(settings.batch_dir, settings.max_store_bytes, max(1, len(settings.api_key)))
        self.changed = asyncio.Event()  # a batch was created or cancelled
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="slipstream-batches")
        self._max_open = settings.max_bodies_bytes
        self.bytes_open = 0  # bytes of files that are being stored or sent

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Calls a method of the store. Raises StoreUnavailable."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args, **kwargs))
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise StoreUnavailable(self.store, error) from error

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Around the use of a file's content in memory. Raises if the contents together are over the limit; one
        above the limit is accepted while there is no other."""
        if self.bytes_open and self.bytes_open + num_bytes > self._max_open:
            fact = f"files with {self.bytes_open} bytes are being stored or sent, the limit is {self._max_open}"
            raise HTTPException(429, f"{fact}; try again soon", retry_after=1, code="files_busy")
        self.bytes_open += num_bytes
        try:
            yield
        finally:
            self.bytes_open -= num_bytes

    def close(self) -> None:
        self._thread.shutdown()
        self.store.close()
