"""Generates the OpenAPI document from the routes and their message types, so that it cannot disagree with them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec

import slipstream
from slipstream.serve.http.errors import ErrorBody
from slipstream.serve.http.routes import Route

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
