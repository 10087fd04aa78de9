"""The format of errors by path, for requests that no route takes."""

from __future__ import annotations

from slipstream.serve.http.anthropic.errors import as_anthropic_error
from slipstream.serve.http.cohere.errors import as_cohere_error
from slipstream.serve.http.errors import HTTPException
from slipstream.serve.http.ollama.errors import as_ollama_error

_FORMATS = {"/api/": as_ollama_error, "/v1/messages/": as_anthropic_error, "/v2/": as_cohere_error}


def in_format_of(path: str, error: HTTPException) -> HTTPException:
    """The error in the format of the API that the path belongs to; OpenAI's where it belongs to no other."""
    for prefix, convert in _FORMATS.items():
        if path.startswith(prefix):
            return convert(error)
    return error
