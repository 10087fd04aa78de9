"""Prompts of token embeddings in requests: a tensor as torch.save writes it, in base64.

The server reads the tensor without torch and without unpickling (`checkpoint/torch_files.py`). Only dense tensors of
floating-point values are accepted.
"""

from __future__ import annotations

import base64
import binascii
import io
import zipfile
import zlib
from typing import Annotated, Any

import msgspec
import numpy as np

from slipstream.base.typed import doc
from slipstream.checkpoint.torch_files import NotPlain, StoredTensor, read_torch_zip
from slipstream.engine.model_description import ModelDescription
from slipstream.serve.http.generation.fields import GenerationFields
from slipstream.serve.http.generation.generation import CompletionLogprobs, PromptLogprob, Usage
from slipstream.serve.http.server.errors import bad_request

_FIELD = "prompt_embeds"
_WANTED = "give base64 of a dense float tensor by torch.save"
_MAX_OTHER = 2**16  # bytes besides the values
_DTYPES = {"float16": "<f2", "bfloat16": "<u2", "float32": "<f4", "float64": "<f8"}


def embeds_of(body: CompletionRequest, description: ModelDescription) -> list[str]:
    """The tensors of a request, still encoded; none if it has no prompt_embeds."""
    if body.prompt_embeds is None:
        return []
    if not description.embed_size:
        raise bad_request(
            f"{description.name} takes no prompt_embeds; start the server with --enable-prompt-embeds, or give prompt",
            _FIELD,
            "unsupported_parameter",
        )
    for name in ("echo", "suffix"):
        if getattr(body, name):
            raise bad_request(f"{name} needs the text of the prompt, and prompt_embeds has none; remove it", name)
    if not body.prompt_embeds:
        raise bad_request(f"prompt_embeds is empty; {_WANTED}", _FIELD)
    return [body.prompt_embeds] if isinstance(body.prompt_embeds, str) else body.prompt_embeds


def decode_embeds(text: str, description: ModelDescription) -> np.ndarray[Any, Any]:
    """The values of one encoded tensor."""
    most = description.max_model_len * description.embed_size * 8 + _MAX_OTHER
    if len(text) > most // 3 * 4 + 4:
        raise bad_request(f"prompt_embeds has {len(text)} characters, more than {description.name} takes", _FIELD)
    try:
        data = base64.b64decode(text, validate=True)
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
                raise ValueError("its entries are compressed")
            if any(archive.read(name) != b"little" for name in archive.namelist() if name.endswith("/byteorder")):
                raise ValueError("its byte order is not little-endian")
            tensor = read_torch_zip(archive)
            if not isinstance(tensor, StoredTensor):
                raise ValueError("it is not one tensor")
            return _values(tensor, archive.read(tensor.storage.entry))
    except binascii.Error as error:
        raise bad_request(f"prompt_embeds is not base64: {error}; {_WANTED}", _FIELD) from None
    except NotPlain as error:
        raise bad_request(f"prompt_embeds contains {error}; {_WANTED}", _FIELD) from None
    except (ValueError, KeyError, OSError, RuntimeError, NotImplementedError, zlib.error, zipfile.BadZipFile) as error:
        raise bad_request(f"prompt_embeds cannot be read: {error}; {_WANTED}", _FIELD) from None


def _values(tensor: StoredTensor, data: bytes) -> np.ndarray[Any, Any]:
    dtype = tensor.storage.dtype
    if dtype not in _DTYPES:
        raise ValueError(f"its dtype is {dtype}")
    stored = np.frombuffer(data, _DTYPES[dtype])
    if tensor.num_needed > len(stored):
        raise ValueError("its storage is too short")
    strides = [stride * stored.itemsize for stride in tensor.strides]
    values = np.lib.stride_tricks.as_strided(stored[tensor.offset :], tensor.shape, strides, writeable=False)
    if dtype == "bfloat16":  # the upper half of a float32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values


# The bodies of POST /v1/completions.


class CompletionRequest(GenerationFields, kw_only=True):
    prompt: Annotated[
        str | list[str | int | list[int]] | None,
        doc("a text, a list of token ids, or a list of either; required without prompt_embeds"),
    ] = None
    prompt_embeds: Annotated[
        str | list[str] | None,
        doc("base64 of a tensor [tokens, hidden size] by torch.save, or a list; before prompt"),
    ] = None
    logprobs: int | None = None
    echo: bool | None = None
    suffix: Annotated[str | None, doc("text after the output, for models with fill-in-the-middle tokens")] = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionResponse(msgspec.Struct):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


def prompts_of(given: str | list[str | int | list[int]] | None) -> list[Any]:
    """Returns a list of prompts, where one prompt or a list is given. A list of integers is one prompt."""
    if given is None:
        raise bad_request("prompt is missing; give a text, token ids or a list of them", "prompt")
    if isinstance(given, str):
        return [given]
    kinds = set(map(type, given))
    if kinds == {int}:
        return [given]
    if kinds in ({str}, {list}):
        return list(given)
    raise bad_request(
        "prompt is empty; give a text, token ids or a list of them"
        if not given
        else "prompt mixes texts and token ids; give a list of one kind",
        "prompt",
    )
