"""What the routes of files and batches share: the store, the owner of a request, and query parameters."""

from __future__ import annotations

from urllib.parse import parse_qsl

from slipstream.serve.http.auth import given_key
from slipstream.serve.http.batch.service import BatchService
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.request import Request


def service_of(request: Request) -> tuple[BatchService, str]:
    """Returns the service and the owner of the request. Raises where the server has no store."""
    service = request.state.batches
    if service is None:
        fact = "files and batches are disabled; start the server with --batch-dir FOLDER to enable them"
        raise HTTPException(403, fact, code="batches_disabled")
    return service, service.store.owner(given_key(request.headers) if request.state.keys.are_used else b"")


def query_of(request: Request, *names: str) -> dict[str, str]:
    """Returns the parameters of the query string. Raises for others than `names`."""
    found: dict[str, str] = {}
    for name, value in parse_qsl(request.query_string.decode("latin-1"), keep_blank_values=True):
        if name not in names:
            raise bad_request(f"there is no parameter {name[:100]}; give {', '.join(names)}", name[:100])
        found[name] = value
    return found


def limit_of(query: dict[str, str], most: int, default: int) -> int:
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= most):
        raise bad_request(f"limit is {text[:20]!r}; give 1 to {most}", "limit")
    return int(text)
