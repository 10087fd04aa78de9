"""BatchOutput: the output file of `run-batch`, which can be continued after the process was killed.

Results are appended to OUTPUT.part as they come, each with its index in the input. When all are there, they are written
to OUTPUT in the order of the input. A run that finds OUTPUT.part continues it: lines with a result are not run again. A
line of OUTPUT.part that is no whole result is dropped: a killed process, a full disk or a power failure leave such
lines. The first line of OUTPUT.part identifies the input and the models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import msgspec

from slipstream.base.errors import UserError
from slipstream.base.files import try_lock


class _FileHeader(msgspec.Struct):
    slipstream_batch: int
    input_sha256: str
    models: list[str]


class LineStatus(msgspec.Struct):
    status_code: int


class StoredResult(msgspec.Struct):
    """The part of a stored result that is read back."""

    response: LineStatus | None

    @property
    def succeeded(self) -> bool:
        return self.response is not None and self.response.status_code == 200


class BatchOutput:
    """A context manager: holds a lock on OUTPUT.part, so that two runs cannot write it."""

    def __init__(self, path: Path, digest: str, models: list[str], num_lines: int, *, overwrite: bool) -> None:
        self.path = path
        self.num_lines = num_lines
        self.part = path.with_name(path.name + ".part")
        self.starts: dict[int, tuple[int, int]] = {}  # offset and length in OUTPUT.part, by index in the input
        header = _FileHeader(1, digest, models)
        if not path.parent.is_dir():
            raise UserError(f"cannot write {path}: there is no folder {path.parent}; create it first")
        if path.exists() and not overwrite and not self.part.exists():
            raise UserError(f"{path} exists; remove it, or give --overwrite")
        try:
            self._file: IO[bytes] = self.part.open("a+b")
        except OSError as error:
            raise UserError(f"cannot write {self.part}: {error.strerror}") from None
        if not try_lock(self._file.fileno()):
            self._file.close()
            raise UserError(f"{self.part} is in use by another run; wait for it, or give another output")
        try:
            self._read(header, overwrite)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()  # with its lock

    def add(self, index: int, result: bytes) -> None:
        """Appends a result; it survives the end of the process from then on."""
        entry = b"%d\t%b\n" % (index, result)
        self.starts[index] = (self._end + len(entry) - len(result) - 1, len(result))
        self._file.write(entry)
        self._file.flush()
        self._end += len(entry)

    def result(self, index: int) -> bytes:
        start, length = self.starts[index]
        self._file.seek(start)
        return self._file.read(length)

    def num_failed(self) -> int:
        """The number of results that are errors, when all are there."""
        results = (msgspec.json.decode(self.result(index), type=StoredResult) for index in range(self.num_lines))
        return sum(not result.succeeded for result in results)

    def finish(self) -> None:
        """Writes OUTPUT in the order of the input, and removes OUTPUT.part."""
        whole = self.path.with_name(self.path.name + ".tmp")
        with open(whole, "wb") as file:
            for index in range(self.num_lines):
                file.write(self.result(index) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(whole, self.path)
        self.part.unlink()

    def _read(self, header: _FileHeader, overwrite: bool) -> None:
        """Reads the results of an earlier run of the same input and models, or begins anew."""
        self._file.seek(0)
        first, own = self._file.readline(), msgspec.json.encode(header)
        # new, or killed while the first line was written
        if overwrite or (not first.endswith(b"\n") and own.startswith(first)):
            self._file.truncate(0)
            self._file.write(own + b"\n")
            self._file.flush()
            self._end = self._file.tell()
            return
        try:
            found = msgspec.json.decode(first, type=_FileHeader)
        except msgspec.MsgspecError:
            raise UserError(f"{self.part} was not written by run-batch; remove it, or give --overwrite") from None
        if found != header:
            what = "input" if found.input_sha256 != header.input_sha256 else "model"
            raise UserError(f"{self.part} has results of another {what}; remove it, or give --overwrite")
        end = self._file.tell()
        for entry in self._file:
            if not entry.endswith(b"\n"):
                break
            if (index := self._index(entry)) is not None:
                before = entry.index(b"\t") + 1
                self.starts[index] = (end + before, len(entry) - before - 1)
            end += len(entry)
        self._file.truncate(end)
        self._file.seek(end)
        self._end = end

    def _index(self, entry: bytes) -> int | None:
        """The index of a result in the input; None for a line that is no whole result."""
        number, _, result = entry.partition(b"\t")
        if not number.isdigit() or not (index := int(number)) < self.num_lines:
            return None
        try:
            msgspec.json.decode(result, type=StoredResult)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        return index
