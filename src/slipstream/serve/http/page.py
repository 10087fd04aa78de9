"""GET /: the web page, from files of the package. It loads nothing from other hosts.

Its files need no API key: a browser sends none for a page, and they are the same for every server of a version.
"""

from __future__ import annotations

import functools
from importlib import resources

from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response
from slipstream.serve.http.routes import get

_KINDS = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; font-src data:; connect-src 'self'; img-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"require-trusted-types-for 'script'; trusted-types 'none'"  # no script can turn a string into HTML or code
)
_HEADERS = (
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)


@functools.cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = resources.files("slipstream.serve.http") / "ui"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _KINDS}


async def show_page(request: Request, body: None) -> Response:
    return _file("index.html")


async def show_file(request: Request, body: None) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    content = page_files().get(name)
    if content is None:
        raise HTTPException(404, f"the page has no file {name[:100]!r}")
    return Response(content, media_type=_KINDS[name.rpartition(".")[2]], headers=_HEADERS)


ROUTES = [
    get("/", show_page, "The web page: chat, playground, timeline, models, requests", access="open"),
    get("/ui/{name}", show_file, "A file of the web page", access="open", quiet=True),
]
