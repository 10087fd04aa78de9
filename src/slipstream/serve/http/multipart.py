"""Reads bodies of type multipart/form-data, with which clients upload files."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from slipstream.serve.http.auth import Headers
from slipstream.serve.http.errors import HTTPException, bad_request
from slipstream.serve.http.origins import check_origin

_MAX_PARTS = 16
_MAX_HEADER_BYTES = 4096
_BOUNDARY = re.compile(rb'boundary=(?:"([^"]{1,70})"|([^\s;"]{1,70}))', re.I)
_DISPOSITION = re.compile(rb"^content-disposition:([^\r\n]*)", re.I | re.M)
_PARAM = re.compile(rb';\s*([\w*]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|([^\s;"]+))')  # .NET's client quotes no names


class FormPart(NamedTuple):
    data: bytes
    filename: str | None = None

    def text(self, name: str) -> str:
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            raise bad_request(f"{name} is not UTF-8; send text", name) from None


def read_form(kind: type[msgspec.Struct], headers: Headers, origins: list[str], body: bytes) -> dict[str, FormPart]:
    """Returns the parts by name. Raises for names that are not fields of `kind`, and where a required one is missing.

    `origins`: those of web pages that may send forms.
    """
    kind_given = dict(headers).get(b"content-type", b"")
    boundary = _BOUNDARY.search(kind_given)
    if kind_given.partition(b";")[0].strip().lower() != b"multipart/form-data" or boundary is None:
        raise HTTPException(415, "the body must be a form; send the header Content-Type: multipart/form-data")
    check_origin(headers, origins)
    parts = _split(body, boundary[1] or boundary[2])
    fields = msgspec.structs.fields(kind)
    known = {field.encode_name: field for field in fields}
    for name in parts:
        if name not in known:
            raise bad_request(f"there is no field {name[:100]}; remove it", name[:100])
    for name, field in known.items():
        if field.required and name not in parts:
            raise bad_request(f"{name} is missing; give it", name)
    return parts


def _split(body: bytes, boundary: bytes) -> dict[str, FormPart]:
    mark = b"--" + boundary
    start = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2  # a form may begin with other lines
    if not body.startswith(mark, start):
        raise bad_request("the form has no line with its boundary; send multipart/form-data")
    parts: dict[str, FormPart] = {}
    start += len(mark)
    while not body.startswith(b"--", start):
        header_end = body.find(b"\r\n\r\n", start, start + _MAX_HEADER_BYTES)
        end = -1 if header_end < 0 else body.find(b"\r\n" + mark, header_end + 2)
        if end < 0:
            raise bad_request("the form is cut off, or a part has no header; send multipart/form-data")
        params = _params(body[start:header_end])
        name = params.get(b"name", b"").decode(errors="replace")
        if not name or name in parts or len(parts) == _MAX_PARTS:
            fact = "a part has no name" if not name else f"{name[:100]} is given twice, or there are too many parts"
            raise bad_request(f"the form is invalid: {fact}; send each field once", name[:100] or None)
        filename = params[b"filename"].decode(errors="replace") if b"filename" in params else None
        parts[name] = FormPart(body[header_end + 4 : end], filename)
        start = end + 2 + len(mark)
    return parts


def _params(headers: bytes) -> dict[bytes, bytes]:
    """The parameters of the header Content-Disposition, by name in lower case."""
    found = _DISPOSITION.search(headers)
    values = () if found is None else _PARAM.findall(found[1])
    return {name.lower(): quoted or plain for name, quoted, plain in values}
