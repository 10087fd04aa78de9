"""`slipstream run-batch`: runs an OpenAI batch file, and continues where a killed run ended."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING

import msgspec

from slipstream.base.errors import EngineDead, UserError
from slipstream.base.files import try_lock
from slipstream.config.options import Options
from slipstream.serve.cli.flags import add_engine_flags, add_struct_flags, check_paths, engine_options
from slipstream.serve.cli.serve import model_options, server_settings
from slipstream.serve.http.server.batch_lines import BatchLine, InvalidLine, LineResult, read_line
from slipstream.serve.http.server.settings import ServerSettings

if TYPE_CHECKING:
    from slipstream.front.async_engine import AsyncEngine
    from slipstream.serve.cli.run import OpenLLM


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser(
        "run-batch",
        help="run an OpenAI batch file",
        description="Runs the requests of an OpenAI batch file (JSON lines with custom_id, method, url and body) and "
        "writes their results in the same order. A run that was interrupted or killed continues with the same command: "
        "lines with a result are not run again. Bodies choose a model by name, as in `serve`.",
        usage="slipstream run-batch [MODEL ...] -i INPUT -o OUTPUT [flags]",
        allow_abbrev=False,
    )
    command.add_argument("models", nargs="*", metavar="MODEL", help="a model as for --model, or NAME=MODEL; repeatable")
    command.add_argument("-i", "--input-file", metavar="PATH", required=True, help="the batch file to read")
    command.add_argument("-o", "--output-file", metavar="PATH", required=True, help="the file of results to write")
    command.add_argument(
        "--overwrite", action="store_true", help="replace the output file, and results of an interrupted run"
    )
    command.add_argument(
        "--concurrency", type=int, metavar="N", default=512, help="lines that run at a time (default: 512)"
    )
    others = set(ServerSettings.__struct_fields__) - set(_SETTINGS)
    add_struct_flags(command, "chat", ServerSettings, leave_out=others)
    add_engine_flags(command)
    command.set_defaults(run=run)


_SETTINGS = ("reasoning_parser", "tool_call_parser", "enable_auto_tool_choice")  # of the server that a batch has too
# the number of lines in flight is the limit, not the queue
_UNBOUNDED = {"max_queued_requests": 2**24, "max_queued_tokens": 2**40}


def run(args: argparse.Namespace, opener: OpenLLM) -> int:
    import asyncio  # like hashlib below: --help does not need it

    if args.concurrency < 1:
        raise UserError(f"--concurrency is {args.concurrency}; give 1 or more")
    source, target = Path(args.input_file), Path(args.output_file)
    num_lines, digest = check_input(source)
    settings = server_settings({name: getattr(args, name) for name in _SETTINGS if hasattr(args, name)} | _UNBOUNDED)
    options = model_options(args.models, engine_options(args))
    names = [each.served_model_name or each.model or "" for each in options]
    with BatchOutput(target, digest, names, num_lines, overwrite=args.overwrite) as output:
        num_kept = len(output.starts)
        if num_kept:
            print(f"continuing: {num_kept} of {num_lines} lines have a result", file=sys.stderr)
        if num_kept < num_lines:
            for each in options:
                check_paths(each, look_up=True)
            run_all = _run_lines(open_engine(options), source, output, num_lines, args.concurrency, settings)
            try:
                asyncio.run(run_all)
            except EngineDead as error:
                raise EngineDead(f"{error}; run the same command again to continue") from None
        failed = output.failed()
        first = output.error(failed[0]) if failed else ""
        output.finish()
    print(f"{num_lines} lines in {target}, {len(failed)} with errors", file=sys.stderr)
    if failed:
        print(f"the first error: {first}", file=sys.stderr)
    return int(len(failed) == num_lines)


def check_input(path: Path) -> tuple[int, str]:
    """Returns the number of lines and a digest of the file. Raises for a line that cannot be run, before the model is
    loaded."""
    import hashlib

    digest = hashlib.sha256()
    seen: dict[str, int] = {}
    for number, text in _numbered(path):
        digest.update(text)
        try:
            line = read_line(text)
        except InvalidLine as error:
            raise UserError(f"{path} line {number}: {error}") from None
        if (first := seen.setdefault(line.custom_id, number)) != number:
            raise UserError(f"{path} line {number}: custom_id {line.custom_id!r} is that of line {first} too")
    if not seen:
        raise UserError(f"{path} has no lines; give one request per line")
    return len(seen), digest.hexdigest()


def open_engine(options: list[Options]) -> AsyncEngine:
    from slipstream.front.async_engine import AsyncEngine  # builds the engine: imports torch

    return AsyncEngine(models=options)


async def _run_lines(
    engine: AsyncEngine,
    source: Path,
    output: BatchOutput,
    num_lines: int,
    concurrency: int,
    settings: ServerSettings,
) -> None:
    import asyncio

    from slipstream.base.log import progress
    from slipstream.serve.http.server.app import App
    from slipstream.serve.http.server.batch_runner import run_lines
    from slipstream.serve.http.server.state import State
    from slipstream.serve.http.table import all_routes

    app = App(State(settings, engine), all_routes())
    kept = set(output.starts)

    async def lines() -> AsyncIterator[tuple[int, BatchLine]]:
        for index, (_, text) in enumerate(_numbered(source)):
            if index not in kept:
                yield index, read_line(text)

    try:
        with progress(num_lines, "lines") as advance:
            for _ in kept:
                advance(0)

            async def done(index: int, result: LineResult) -> None:
                output.add(index, result.encode())
                advance(_num_tokens(result))

            await run_lines(app, lines(), asyncio.Semaphore(concurrency), "", done)
    finally:
        await engine.close()


def _numbered(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields the lines that are not empty, with their numbers in the file."""
    try:
        with open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if text.strip():
                    yield number, text.rstrip(b"\r\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or os.strerror(error.errno or 0)}") from None


class _Usage(msgspec.Struct):
    total_tokens: int = 0


class _Body(msgspec.Struct):
    usage: _Usage | None = None


def _num_tokens(result: LineResult) -> int:
    if result.response is None or not result.succeeded:
        return 0
    try:
        usage = msgspec.json.decode(result.response.body, type=_Body).usage
    except msgspec.MsgspecError:  # a list, from a route in TEI's format
        return 0
    return 0 if usage is None else usage.total_tokens


# BatchOutput: the output file of `run-batch`, which can be continued after the process was killed.
#
# Results are appended to OUTPUT.part as they come, each with its index in the input. When all are there, they are
# written to OUTPUT in the order of the input. A run that finds OUTPUT.part continues it: lines with a result are not
# run again. A line of OUTPUT.part that is no whole result is dropped: a killed process, a full disk or a power failure
# leave such lines. The first line of OUTPUT.part identifies the input and the models.


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

    def failed(self) -> list[int]:
        """The indices of results that are errors, when all are there."""
        results = (msgspec.json.decode(self.result(index), type=StoredResult) for index in range(self.num_lines))
        return [index for index, result in enumerate(results) if not result.succeeded]

    def error(self, index: int) -> str:
        """The line's id and the message of its error, in the format of whichever API its route has."""
        result = msgspec.json.decode(self.result(index))
        found = result["error"] or result["response"]["body"]
        while isinstance(found, dict) and (inner := found.get("error") or found.get("message")):
            found = inner
        return f"{result['custom_id']}: {found}"

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
