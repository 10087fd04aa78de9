"""OpenAI's objects of files and batches."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.serve.http.batch.lines import BatchLineError

OPEN = ("validating", "in_progress", "finalizing", "cancelling")
"""States of a batch that is not finished; the others are completed, failed, expired and cancelled."""


class FileObject(msgspec.Struct):
    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"
    status_details: str | None = None


class FileList(msgspec.Struct):
    data: list[FileObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"


class FileDeleted(msgspec.Struct):
    id: str
    object: str = "file"
    deleted: bool = True


class BatchErrors(msgspec.Struct):
    data: list[BatchLineError]
    object: str = "list"


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: str
    seconds: int


class RequestCounts(msgspec.Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(msgspec.Struct, kw_only=True):
    id: str
    object: str = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None  # as requested; not a field of OpenAI's


class BatchList(msgspec.Struct):
    data: list[BatchObject]
    has_more: bool
    first_id: str | None = None
    last_id: str | None = None
    object: str = "list"
