"""The compiled threads of `native.c`: of the wheel, or compiled on the user's machine if it has a C compiler.

The host half cannot import `ops/native.py`, which needs torch. The library is small and compiles in under a second, in
the background thread that compiles the first grammar. Without it, grammars run in Python, one row after another.

SLIPSTREAM_NATIVE=0 in the environment disables it, as it disables the kernels of `ops`.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

FLAGS = ("-O2", "-fPIC", "-std=gnu11", "-pthread", "-shared")
_NAMES = ("native", "mask_row", "mask_memory", "json_schema", "json_state", "forced_texts")
SOURCES = tuple(Path(__file__).with_name(f"{name}.c") for name in _NAMES)
HEADERS = tuple(Path(__file__).with_name(f"{name}.h") for name in _NAMES[1:-1])
PREBUILT = Path(__file__).with_name("prebuilt")
_COMPILE_LIMIT = 60.0  # seconds
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "slip_masks_open": (_POINTER, [_POINTER, _INT, _INT, _INT, _INT, _INT, _INT]),
    "slip_masks_rows": (_POINTER, [_POINTER]),
    "slip_masks_start": (None, [_POINTER, _INT, _INT, _POINTER, _POINTER]),
    "slip_masks_changed": (_INT, [_POINTER, _INT, _INT, ctypes.c_float, _POINTER]),
    "slip_masks_send": (None, [_POINTER, _POINTER, _INT, _INT]),
    "slip_masks_wait": (_INT, [_POINTER, _INT, _INT, _INT]),
    "slip_masks_abandon": (_INT, [_POINTER, _INT]),
    "slip_masks_close": (None, [_POINTER]),
    "slip_texts_open": (_POINTER, [_POINTER]),
    "slip_texts_close": (None, [_POINTER]),
    "slip_masks_num_found": (_INT, [_POINTER]),
    "slip_schema_open": (
        _POINTER,
        [_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT],
    ),
    "slip_schema_close": (None, [_POINTER]),
    "slip_walker_open": (_POINTER, [_POINTER]),
    "slip_walker_copy": (_POINTER, [_POINTER]),
    "slip_walker_reset": (None, [_POINTER]),
    "slip_walker_take": (None, [_POINTER, _INT]),
    "slip_walker_close": (None, [_POINTER]),
}


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library; None without a compiler. The first call may compile it."""
    if os.environ.get("SLIPSTREAM_NATIVE") == "0":
        return None
    for path in (PREBUILT / f"{platform.machine()}.so", _compiled()):
        if path is not None and path.exists():
            try:
                return _open(path)
            except OSError as error:  # compiled for another C library
                log.info("the threads for grammars cannot be loaded: %s", error)
    return None


def _open(path: Path) -> ctypes.CDLL:
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function: Any = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def _compiled() -> Path | None:
    """The library in the user's cache folder, compiled now if it is not there."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return None
    key = hashlib.sha256(
        b"".join(path.read_bytes() for path in (*SOURCES, *HEADERS))
        + " ".join((compiler, platform.machine(), *FLAGS)).encode()
    )
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    target = Path(base) / "slipstream" / "native" / f"grammar-{key.hexdigest()[:24]}.so"
    if target.exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = os.path.join(folder, "grammar.so")
            command = [compiler, *FLAGS, *map(str, SOURCES), "-o", made]
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_LIMIT)
            os.replace(made, target)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the threads for grammars did not compile, masks are filled one after another: %s", error)
        return None
    return target
