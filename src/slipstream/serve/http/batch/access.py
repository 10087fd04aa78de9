"""Code that the routes of files and batches share: the store, and the owner of a request."""

from __future__ import annotations

from slipstream.serve.http.auth import given_key
from slipstream.serve.http.batch.service import BatchService
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.request import Request


def service_of(request: Request) -> tuple[BatchService, str]:
    """Returns the service and the owner of the request. Raises if the server has no store."""
    service = request.state.batches
    if service is None:
        fact = "files and batches are disabled; start the server with --batch-dir FOLDER to enable them"
        raise HTTPException(403, fact, code="batches_disabled")
    return service, service.store.owner(given_key(request.headers) if request.state.keys.are_used else b"")
