"""/v1/files: input and output files of batches. A file is visible to the API key that stored it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Any

import msgspec

from slipstream.serve.http.batch.access import service_of
from slipstream.serve.http.batch.objects import FileDeleted, FileList, FileObject
from slipstream.serve.http.batch.service import BatchService
from slipstream.serve.http.batch.store import KEEP_SECONDS
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.multipart import FormPart
from slipstream.serve.http.query import limit_of, newest_first, query_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, StreamFormat, StreamingResponse, json_response
from slipstream.serve.http.routes import delete, get, post

_LEAST_SECONDS = 3600


class FileForm(msgspec.Struct):
    """The fields of an upload."""

    file: Annotated[bytes, msgspec.Meta(extra_json_schema={"type": "string", "format": "binary"})]
    purpose: Annotated[str, msgspec.Meta(description="batch")]
    anchor: Annotated[str, msgspec.Meta(description="created_at")] = msgspec.field(
        default="created_at", name="expires_after[anchor]"
    )
    seconds: Annotated[int, msgspec.Meta(description="3600 to 2592000, the default")] = msgspec.field(
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


_AT_ONCE: dict[str, Any] = dict(needs_engine=False, uses_queue=False)

ROUTES = [
    post("/v1/files", upload_file, "Store a file", form=FileForm, response_model=FileObject, **_AT_ONCE),
    get("/v1/files", list_files, "The files of this API key", response_model=FileList),
    get("/v1/files/{file}", show_file, "One file", response_model=FileObject),
    get("/v1/files/{file}/content", file_content, "The content of a file"),
    delete("/v1/files/{file}", delete_file, "Delete a file", response_model=FileDeleted),
]
