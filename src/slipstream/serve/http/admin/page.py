"""GET /: the web page, from files of the package. It loads nothing from other hosts.

Its files need no API key: a browser sends none for a page, and they are the same for every server of a version.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

import slipstream
from slipstream.serve.http.server.errors import ErrorBody, HTTPException
from slipstream.serve.http.server.request import Request, Route, get
from slipstream.serve.http.server.response import Response, json_response

_KINDS = {
    "html": b"text/html; charset=utf-8",
    "js": b"text/javascript; charset=utf-8",
    "css": b"text/css; charset=utf-8",
    "svg": b"image/svg+xml",
    "md": b"text/markdown; charset=utf-8",  # a page of the docs, which the timeline shows
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
    (b"cache-control", b"no-cache"),  # a browser asks each time whether its copy is current
    (b"vary", b"accept-encoding"),
)


@functools.cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name."""
    folder = resources.files("slipstream.serve.http") / "ui"
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name.rpartition(".")[2] in _KINDS}


@functools.cache
def _packed(name: str) -> tuple[bytes, bytes]:
    """A file compressed, and its entity tag."""
    content = page_files()[name]
    return gzip.compress(content, mtime=0), b'"%b"' % hashlib.sha256(content).hexdigest()[:20].encode()


async def show_page(request: Request, body: None) -> Response:
    return _file(request, "index.html")


async def show_file(request: Request, body: None) -> Response:
    return _file(request, request.path_params["name"])


def _file(request: Request, name: str) -> Response:
    content = page_files().get(name)
    if content is None:
        raise HTTPException(404, f"the page has no file {name[:100]!r}")
    packed, tag = _packed(name)
    kind, headers = _KINDS[name.rpartition(".")[2]], (*_HEADERS, (b"etag", tag))
    if tag.decode() in (request.header(b"if-none-match") or ""):
        return Response(b"", 304, kind, headers)
    if "gzip" in (request.header(b"accept-encoding") or ""):
        return Response(packed, media_type=kind, headers=(*headers, (b"content-encoding", b"gzip")))
    return Response(content, media_type=kind, headers=headers)


ROUTES = [
    get("/", show_page, "The web page: chat, playground, timeline, models, requests", access="open"),
    get("/ui/{name}", show_file, "A file of the web page", access="open", quiet=True),
]


# GET /docs and /openapi.json: the documentation of the routes, on a page that loads nothing from other hosts.
#
# Both need no API key: a browser sends none for a page, and the content is the same for every server of a version.

_DOCS_HEADERS = (
    (b"content-security-policy", b"default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"),
)

PAGE = b"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Routes of Slipstream</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="ui/icon.svg" type="image/svg+xml">
<style>
:root { color-scheme: light dark }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
body { overflow-wrap: anywhere }
summary { cursor: pointer; padding: .3em 0 } code, pre { font: 13px/1.4 ui-monospace, monospace }
table { border-collapse: collapse; width: 100% } td { border-top: 1px solid #ddd; padding: .2em .6em .2em 0 }
b.m { display: inline-block; width: 3.5em } h2 { font-size: 1em }
</style>
<main><h1>Routes of Slipstream</h1><p>Also as <a href="openapi.json">openapi.json</a>. <span id="key"></span></p>
<div id="routes">loading...</div></main>
<script>
const text = (tag, value) => { const e = document.createElement(tag); e.textContent = value; return e }
const kind = s => s.$ref ? s.$ref.split("/").pop() : s.anyOf ? s.anyOf.map(kind).join(" | ")
  : s.type === "array" ? "[" + kind(s.items || {}) + "]" : s.const !== undefined ? String(s.const) : s.type || "any"
const fields = (page, schema) => {
  const table = document.createElement("table"), found = page.components.schemas[kind(schema)] || schema
  for (const [name, field] of Object.entries(found.properties || {})) {
    const row = document.createElement("tr"), must = (found.required || []).includes(name)
    for (const [tag, value] of [["code", name + (must ? " *" : "")], ["code", kind(field)],
                                ["span", field.description || ""]]) {
      const cell = document.createElement("td"); cell.append(text(tag, value)); row.append(cell) }
    table.append(row) }
  return table }
fetch("openapi.json").then(r => r.json()).then(page => {
  const list = document.getElementById("routes"); list.textContent = ""
  if (page.security) document.getElementById("key").textContent = "Requests need a key: Authorization: Bearer KEY."
  for (const [path, methods] of Object.entries(page.paths)) for (const [method, op] of Object.entries(methods)) {
    const block = document.createElement("details"), head = document.createElement("summary")
    const name = text("b", method.toUpperCase()); name.className = "m"
    head.append(name, text("code", path), " " + op.summary); block.append(head)
    const body = Object.values(op.requestBody?.content || {})[0]?.schema
    const answer = op.responses["200"].content?.["application/json"].schema
    if (body) block.append(text("h2", "body: " + kind(body)), fields(page, body))
    if (answer) block.append(text("h2", "response: " + kind(answer)), fields(page, answer))
    list.append(block) } })
</script>
"""


def docs_routes(described: Sequence[Route]) -> list[Route]:
    """Returns the routes of the documentation of `described`."""

    async def show(request: Request, body: None) -> Response:
        return Response(PAGE, media_type=b"text/html; charset=utf-8", headers=_DOCS_HEADERS)

    async def description(request: Request, body: None) -> Response:
        return json_response(openapi(described, has_keys=bool(request.state.settings.api_key)))

    return [
        get("/docs", show, "This page", access="open"),
        get("/openapi.json", description, "The OpenAPI document", access="open"),
    ]


# Generates the OpenAPI document from the routes and their message types, so that it cannot disagree with them.

_REF = "#/components/schemas/{name}"


def openapi(routes: Sequence[Route], *, has_keys: bool) -> dict[str, Any]:
    kinds = [
        kind
        for route in routes
        for kind in (route.body, route.form, route.response_model, route.error_model)
        if kind is not None
    ]
    shown = list(dict.fromkeys([*kinds, ErrorBody]))
    schemas, components = msgspec.json.schema_components(shown, ref_template=_REF)
    refs = dict(zip(shown, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(re.sub(r":path\}", "}", route.path), {})[route.method.lower()] = _operation(route, refs)
    page: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Slipstream", "version": slipstream.__version__},
        "paths": paths,
        "components": {"schemas": components},
    }
    if has_keys:
        page["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        page["security"] = [{"key": []}]
    return page


def _operation(route: Route, refs: dict[Any, Any]) -> dict[str, Any]:
    answer = {"application/json": {"schema": refs[route.response_model]}} if route.response_model is not None else {}
    failed = {"application/json": {"schema": refs[route.error_model or ErrorBody]}}
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', route.path).rstrip('_')}",
        "responses": {
            "200": {"description": "success", **({"content": answer} if answer else {})},
            "4XX": {"description": "invalid request", "content": failed},
            "503": {"description": "not ready, or not healthy"},
        },
    }
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": refs[route.body]}}}
    if route.form is not None:
        operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": refs[route.form]}}}
    names = re.findall(r"\{(\w+)", route.path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if route.access == "open":
        operation["security"] = []
    return operation
