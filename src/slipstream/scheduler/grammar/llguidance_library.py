"""The C functions of the shared library of llguidance's Python package."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Any

log = logging.getLogger(__name__)

_POINTER, _SIZE = ctypes.c_void_p, ctypes.c_size_t
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "llg_new_tokenizer_v2": (_POINTER, [_POINTER, ctypes.c_char_p, _SIZE]),
    "llg_free_tokenizer": (None, [_POINTER]),
    "llg_constraint_init_set_defaults": (None, [_POINTER, _POINTER]),
    "llg_new_matcher": (_POINTER, [_POINTER, ctypes.c_char_p, ctypes.c_char_p]),
    "llg_clone_matcher": (_POINTER, [_POINTER]),
    "llg_matcher_reset": (ctypes.c_int32, [_POINTER]),
    "llg_free_matcher": (None, [_POINTER]),
    "llg_matcher_consume_token": (ctypes.c_int32, [_POINTER, ctypes.c_uint32]),
    "llg_matcher_is_stopped": (ctypes.c_bool, [_POINTER]),
    "llg_matcher_is_error": (ctypes.c_bool, [_POINTER]),
    "llg_matcher_get_error": (ctypes.c_char_p, [_POINTER]),
    "llg_matcher_compute_ff_tokens": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
    "llg_matcher_compute_mask_into": (ctypes.c_int32, [_POINTER, _POINTER, _SIZE]),
}


@functools.cache
def llguidance_library() -> ctypes.CDLL | None:
    """The library of the llguidance package; None if it does not export these functions."""
    from llguidance import _lib

    try:
        library = ctypes.CDLL(str(_lib.__file__))
        for name, (result, arguments) in _SIGNATURES.items():
            function: Any = getattr(library, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        log.info("llguidance is used without its C functions: %s", error)
        return None
    return library
