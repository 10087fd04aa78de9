"""/v1/batches: batches of requests from a stored file, which `BatchRunner` runs."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from slipstream.base.typed import Fields, doc
from slipstream.serve.http.server.access import given_key
from slipstream.serve.http.server.batch_lines import ENDPOINTS
from slipstream.serve.http.server.batch_store import (
    KEEP_SECONDS,
    BatchList,
    BatchObject,
    BatchService,
    ExpiresAfter,
    FileDeleted,
    FileList,
    FileObject,
)
from slipstream.serve.http.server.body import FormPart
from slipstream.serve.http.server.errors import HTTPException, bad_request
from slipstream.serve.http.server.request import Request, delete, get, limit_of, newest_first, post, query_of
from slipstream.serve.http.server.response import Response, StreamFormat, StreamingResponse, json_response

_WINDOWS = {"24h": 86400}
_MAX_METADATA = (16, 64, 512)  # entries, characters of a key, of a value


class BatchRequest(Fields, kw_only=True):
    input_file_id: str
    endpoint: Annotated[str, msgspec.Meta(description=f"the url of all lines: {', '.join(ENDPOINTS)}")]
    completion_window: Annotated[str, doc("24h: lines without a result then fail")]
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[ExpiresAfter | None, doc("anchor created_at, and seconds; default 30 days")] = None


async def create_batch(request: Request, body: BatchRequest) -> Response:
    service, owner = service_of(request)
    if body.endpoint not in ENDPOINTS:
        raise bad_request(f"endpoint is {body.endpoint!r:.100}; give one of {', '.join(ENDPOINTS)}", "endpoint")
    if (seconds := _WINDOWS.get(body.completion_window)) is None:
        name = "completion_window"
        raise bad_request(f"{name} is {body.completion_window!r:.50}; give {' or '.join(_WINDOWS)}", name)
    _check_metadata(body.metadata or {})
    if (kept := body.output_expires_after) is not None:
        keep_seconds(kept.anchor, str(kept.seconds), "output_expires_after")  # raises for other values
    file = await service.run(service.store.file, owner, body.input_file_id)
    if file is None:
        error = no_file(body.input_file_id)
        error.param = "input_file_id"
        raise error
    if file.purpose != "batch":
        raise bad_request(f"the file {file.id} has results; give one with requests", "input_file_id")
    now = int(time.time())
    batch = BatchObject(
        id=f"batch_{secrets.token_hex(12)}",
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=now,
        expires_at=now + seconds,
        metadata=body.metadata,
        output_expires_after=body.output_expires_after,
    )
    await service.run(service.store.add_batch, owner, batch)
    service.changed.set()
    return json_response(batch)


def _check_metadata(given: dict[str, str]) -> None:
    most, most_key, most_value = _MAX_METADATA
    if len(given) > most or any(len(key) > most_key or len(value) > most_value for key, value in given.items()):
        limits = f"{most} entries, {most_key} characters of a key, {most_value} of a value"
        raise bad_request(f"metadata is too large; the limits are {limits}", "metadata")


async def list_batches(request: Request, body: None) -> Response:
    service, owner = service_of(request)
    query = query_of(request, "limit", "after")
    limit = limit_of(query, 100, 20)
    found = await service.run(service.store.batches, owner, query.get("after"), limit + 1)
    shown = found[:limit]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(BatchList(shown, len(found) > limit, *ends))


async def show_batch(request: Request, body: None) -> Response:
    service, owner = service_of(request)
    batch = await service.run(service.store.batch, owner, request.path_params["batch"])
    if batch is None:
        raise _no_batch(request)
    return json_response(batch)


async def cancel_batch(request: Request, body: None) -> Response:
    service, owner = service_of(request)

    def cancel(batch: BatchObject) -> None:
        if batch.status not in ("validating", "in_progress", "cancelling"):
            fact = f"the batch is {batch.status}; only one that is validating or in progress can be cancelled"
            raise HTTPException(409, fact, param="batch_id", code="batch_finished")
        batch.status = "cancelling"
        batch.cancelling_at = batch.cancelling_at or int(time.time())

    batch = await service.run(service.store.change_batch, owner, request.path_params["batch"], cancel)
    if batch is None:
        raise _no_batch(request)
    service.changed.set()
    return json_response(batch)


def _no_batch(request: Request) -> HTTPException:
    fact = f"there is no batch {request.path_params['batch'][:100]}; see /v1/batches"
    return HTTPException(404, fact, param="batch_id", code="batch_not_found")


_AT_ONCE: dict[str, Any] = dict(needs_engine=False, uses_queue=False)

ROUTES = [
    post(
        "/v1/batches", create_batch, "Run the requests of a file", BatchRequest, response_model=BatchObject, **_AT_ONCE
    ),
    get("/v1/batches", list_batches, "The batches of this API key", response_model=BatchList),
    get("/v1/batches/{batch}", show_batch, "One batch", response_model=BatchObject),
    post("/v1/batches/{batch}/cancel", cancel_batch, "Cancel a batch", response_model=BatchObject, **_AT_ONCE),
]


# /v1/files: input and output files of batches. A file is visible to the API key that stored it.

_LEAST_SECONDS = 3600


class FileForm(msgspec.Struct):
    """The fields of an upload."""

    file: Annotated[bytes, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
    purpose: Annotated[str, doc("batch")]
    anchor: Annotated[str, doc("created_at")] = msgspec.field(default="created_at", name="expires_after[anchor]")
    seconds: Annotated[int, doc("3600 to 2592000, the default")] = msgspec.field(
        default=KEEP_SECONDS, name="expires_after[seconds]"
    )


async def upload_file(request: Request, body: dict[str, FormPart]) -> Response:
    service, owner = service_of(request)
    purpose = body["purpose"].text("purpose")
    if purpose != "batch":
        raise bad_request(f"purpose is {purpose[:50]!r}; this server stores files of batches, give batch", "purpose")
    texts = {name: body[name].text(name) for name in body if name.startswith("expires_after")}
    anchor, seconds = texts.get("expires_after[anchor]"), texts.get("expires_after[seconds]")
    data = body["file"].data
    if not data:
        raise bad_request("file is empty; send JSON lines", "file")
    name = (body["file"].filename or "upload.jsonl")[:255]
    kept = keep_seconds(anchor, seconds, "expires_after")
    with service.holding(len(data)):
        return json_response(await service.run(service.store.add_file, owner, name, purpose, data, kept))


def keep_seconds(anchor: str | None, seconds: str | None, name: str) -> int:
    """Returns the seconds for which a file is kept."""
    if anchor is None and seconds is None:
        return KEEP_SECONDS
    if anchor != "created_at":
        raise bad_request(f"{name}.anchor is {anchor!r:.50}; give created_at", f"{name}[anchor]")
    text = seconds or ""
    if not (text.isascii() and text.isdigit() and len(text) < 9 and _LEAST_SECONDS <= int(text) <= KEEP_SECONDS):
        fact = f"{name}.seconds is {text[:20]!r}; give {_LEAST_SECONDS} to {KEEP_SECONDS}"
        raise bad_request(fact, f"{name}[seconds]")
    return int(text)


async def list_files(request: Request, body: None) -> Response:
    service, owner = service_of(request)
    query = query_of(request, "purpose", "limit", "after", "order")
    limit, order, purpose = limit_of(query, 10_000, 10_000), newest_first(query), query.get("purpose")
    found = await service.run(service.store.files, owner, query.get("after"), limit + 1, order, purpose)
    shown = found[:limit]
    ends = (shown[0].id, shown[-1].id) if shown else (None, None)
    return json_response(FileList(shown, len(found) > limit, *ends))


async def show_file(request: Request, body: None) -> Response:
    service, owner = service_of(request)
    file = await service.run(service.store.file, owner, request.path_params["file"])
    if file is None:
        raise no_file(request.path_params["file"])
    return json_response(file)


async def file_content(request: Request, body: None) -> StreamingResponse:
    service, owner = service_of(request)
    file = await service.run(service.store.file, owner, request.path_params["file"])
    if file is None:
        raise no_file(request.path_params["file"])
    length = (b"content-length", str(file.bytes).encode())
    return StreamingResponse(_pieces(service, owner, file), _OCTETS, (length, (b"x-content-type-options", b"nosniff")))


_OCTETS = StreamFormat(b"application/octet-stream", None, lambda error: b"")
_PIECE_BYTES = 2**20


async def _pieces(service: BatchService, owner: str, file: FileObject) -> AsyncIterator[bytes]:
    """The content, which counts as held until the last piece is sent."""
    with service.holding(file.bytes):
        data = await service.run(service.store.content, owner, file.id)
        if data is None:
            raise no_file(file.id)
        for start in range(0, len(data), _PIECE_BYTES):
            yield data[start : start + _PIECE_BYTES]


async def delete_file(request: Request, body: None) -> Response:
    service, owner = service_of(request)
    if not await service.run(service.store.delete_file, owner, request.path_params["file"]):
        raise no_file(request.path_params["file"])
    return json_response(FileDeleted(request.path_params["file"]))


def no_file(id: str) -> HTTPException:
    return HTTPException(404, f"there is no file {id[:100]}; see /v1/files", param="file_id", code="file_not_found")


FILE_ROUTES = [
    post("/v1/files", upload_file, "Store a file", form=FileForm, response_model=FileObject, **_AT_ONCE),
    get("/v1/files", list_files, "The files of this API key", response_model=FileList),
    get("/v1/files/{file}", show_file, "One file", response_model=FileObject),
    get("/v1/files/{file}/content", file_content, "The content of a file"),
    delete("/v1/files/{file}", delete_file, "Delete a file", response_model=FileDeleted),
]


# Code that the routes of files and batches share: the store, and the owner of a request.


def service_of(request: Request) -> tuple[BatchService, str]:
    """Returns the service and the owner of the request. Raises if the server has no store."""
    service = request.state.batches
    if service is None:
        fact = "files and batches are disabled; start the server with --batch-dir FOLDER to enable them"
        raise HTTPException(403, fact, code="batches_disabled")
    return service, service.store.owner(given_key(request.headers) if request.state.keys.are_used else b"")
