"""/v1/batches: batches of requests from a stored file, which `BatchRunner` runs."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

import msgspec

from slipstream.serve.http.batch.access import service_of
from slipstream.serve.http.batch.files import keep_seconds, no_file
from slipstream.serve.http.batch.lines import ENDPOINTS
from slipstream.serve.http.batch.objects import BatchList, BatchObject, ExpiresAfter
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.query import limit_of, query_of
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import get, post

_WINDOWS = {"24h": 86400}
_MAX_METADATA = (16, 64, 512)  # entries, characters of a key, of a value


class BatchRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: Annotated[str, msgspec.Meta(description=f"the url of all lines: {', '.join(ENDPOINTS)}")]
    completion_window: Annotated[str, msgspec.Meta(description="24h: lines without a result then fail")]
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[
        ExpiresAfter | None, msgspec.Meta(description="anchor created_at, and seconds; default 30 days")
    ] = None


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
