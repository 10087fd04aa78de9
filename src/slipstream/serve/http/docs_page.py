"""GET /docs and /openapi.json: the documentation of the routes, on a page that loads nothing from other hosts.

Both need no API key: a browser sends none for a page, and the content is the same for every server of a version.
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.serve.http.openapi import openapi
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response, json_response
from slipstream.serve.http.routes import Route, get

_HEADERS = ((b"content-security-policy", b"default-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"),)

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
        return Response(PAGE, media_type=b"text/html; charset=utf-8", headers=_HEADERS)

    async def description(request: Request, body: None) -> Response:
        return json_response(openapi(described, has_keys=bool(request.state.settings.api_key)))

    return [
        get("/docs", show, "This page", access="open"),
        get("/openapi.json", description, "The OpenAPI document", access="open"),
    ]
