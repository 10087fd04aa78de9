"""Admin routes that load and unload LoRA adapters: disabled without an admin key and without --lora-folders."""

from __future__ import annotations

from pathlib import Path

import msgspec

from slipstream.base.errors import ModelNotFound
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.request import Request
from slipstream.serve.http.response import Response
from slipstream.serve.http.routes import post


class LoadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    base_model_name: str | None = None  # if several models take adapters
    load_inplace: bool = False  # replace an adapter of this name


class UnloadAdapterBody(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str


async def load_lora_adapter(request: Request, body: LoadAdapterBody) -> Response:
    """Requests can name the adapter as their model from now on."""
    state = request.state
    _check_workers(request)
    request.field_names["lora_request"] = "lora_name"
    path = _allowed(body.lora_path, state.settings.lora_folders)
    state.engine.load_adapter(body.lora_name, path, base=body.base_model_name, replace=body.load_inplace)
    return Response(f"Success: LoRA adapter {body.lora_name!r} added successfully.".encode(), media_type=b"text/plain")


async def unload_lora_adapter(request: Request, body: UnloadAdapterBody) -> Response:
    _check_workers(request)
    try:
        request.state.engine.unload_adapter(body.lora_name)
    except ModelNotFound as error:
        raise HTTPException(404, str(error), param="lora_name", code="model_not_found") from None
    text = f"Success: LoRA adapter {body.lora_name!r} removed successfully."
    return Response(text.encode(), media_type=b"text/plain")


def _check_workers(request: Request) -> None:
    if request.state.settings.workers > 1:
        raise HTTPException(
            409,
            "each front end has its own list of adapters, and there are several; use --workers 1, or --lora-modules at "
            "start",
            code="several_front_ends",
        )


def _allowed(path: str, folders: list[str]) -> str:
    """The path, if it lies in one of the folders after links are followed."""
    if not folders:
        raise HTTPException(403, "loading adapters is disabled; start the server with --lora-folders to enable it")
    try:
        found = Path(path).resolve()
    except (OSError, ValueError, RuntimeError):
        raise bad_request("lora_path is not a path; give a folder", "lora_path") from None
    if not any(found.is_relative_to(Path(folder).resolve()) for folder in folders):
        raise bad_request("lora_path is outside of the folders of --lora-folders; move the adapter there", "lora_path")
    return str(found)


ROUTES = [
    post(
        "/v1/load_lora_adapter", load_lora_adapter, "Load a LoRA adapter", LoadAdapterBody, access="admin",
        uses_queue=False,
    ),
    post(
        "/v1/unload_lora_adapter", unload_lora_adapter, "Unload a LoRA adapter", UnloadAdapterBody, access="admin",
        uses_queue=False,
    ),
]  # fmt: skip
