"""Fused CPU kernels in C, where the machine has a compiler: many small torch calls become one.

Each op folder may hold a `native.c`. They are compiled in the background, when the first decode step asks for it, so no
first token ever waits; until then, and without a compiler, the references serve. Only low-bit weights wait for them
(`ops/low_bit/interleaved.py`), since no product of torch is as accurate. The result is kept in the user's cache folder
under a name made of sources, flags and processor. Kernels take float32 on the CPU.

SLIPSTREAM_NATIVE=0 in the environment turns all of this off.
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
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger(__name__)

POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float

# No -ffast-math: linking it in would turn off small numbers for the whole process. No contraction of products and sums:
# the bits of a result follow from the source (native_math.h), so they are the same in every copy of a loop.
_FLAGS = (
    "-O3", "-march=native", "-fPIC", "-std=gnu11", "-ffp-contract=off",
    "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd",
)  # fmt: skip
_COMPILE_LIMIT = 120.0  # seconds

_library: ctypes.CDLL | None = None
_asked = _building = _failed = False
_lock = threading.Lock()


def library() -> ctypes.CDLL | None:
    """The kernels if they are compiled; None until then. Cheap to ask each time."""
    if not _asked:
        _open_compiled()
    return _library


def serves(x: torch.Tensor) -> bool:
    """Whether the kernels take this tensor: real numbers, float32, on the CPU."""
    return type(x) is torch.Tensor and x.dtype is torch.float32 and x.is_cpu and library() is not None


def build_in_background() -> None:
    """Compile unless that was done or is being tried. Comes from the first decode step."""
    global _building
    if _building or library() is not None:
        return
    with _lock:
        if _building:
            return
        _building = True
    if _enabled() and _compiler() is not None:
        threading.Thread(target=build, args=(10,), name="slipstream-compile", daemon=True).start()


def state() -> str:
    """For people."""
    if library() is not None:
        return "compiled"
    if not _enabled():
        return "turned off by SLIPSTREAM_NATIVE=0"
    if _failed:
        return "none: they did not compile"
    return "none: no C compiler" if _target() is None else "compiled in the background by the first run"


def build(nice: int = 0) -> bool:
    """Compile now if need be: some seconds, once a machine. Says whether there are kernels."""
    global _failed, _library
    if library() is not None:
        return True
    target = _target()
    if not _enabled() or target is None or _failed:
        return False
    log.info("compiling the fused CPU kernels, which takes a few seconds and is done once")
    try:
        _compile(target, nice)
        _library = _load(target)
    except (OSError, subprocess.SubprocessError) as error:
        log.info("the fused CPU kernels did not compile, torch's own operations serve instead: %s", _reason(error))
        _failed = True
        return False
    return True


def _open_compiled() -> None:
    global _asked, _library
    with _lock:
        if _asked:
            return
        target = _target() if _enabled() else None
        if target is not None and target.exists():
            try:
                _library = _load(target)
            except OSError:
                target.unlink(missing_ok=True)  # made for another machine, or cut short
        _asked = True


def _load(path: Path) -> ctypes.CDLL:
    runtime = _openmp()
    if runtime is not None:
        ctypes.CDLL(runtime, ctypes.RTLD_GLOBAL)
    found = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        function: Any = getattr(found, name)
        function.argtypes = arguments
        function.restype = INT if name in _ANSWER else None
    return found


def _compile(target: Path, nice: int) -> None:
    compiler = _compiler()
    assert compiler is not None
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # Python code between fork and exec is not safe beside other threads, so it runs only where it is needed
        slow_down = (lambda: os.nice(nice)) if nice else None
        run = functools.partial(
            subprocess.run, check=True, capture_output=True, timeout=_COMPILE_LIMIT, preexec_fn=slow_down
        )
        objects = {str(source): os.path.join(folder, f"{source.parent.name}.o") for source in _sources()}
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            commands = [[compiler, *_flags(), "-c", source, "-o", made] for source, made in objects.items()]
            list(pool.map(run, commands))  # raises what one of them raised
        result = os.path.join(folder, "all.so")
        # the OpenMP runtime is left open: torch's own serves, so that there is one pool of threads
        run([compiler, "-shared", *objects.values(), "-o", result])
        os.replace(result, target)


@functools.cache
def _sources() -> tuple[Path, ...]:
    return tuple(sorted(Path(__file__).parent.glob("*/native.c")))


@functools.cache
def _target() -> Path | None:
    """Where the compiled kernels lie, or None without a compiler."""
    compiler = _compiler()
    if compiler is None or not _sources():
        return None
    key = hashlib.sha256()
    for part in (compiler, *_flags(), platform.machine(), _processor()):
        key.update(part.encode() + b"\0")
    for source in (*_sources(), *sorted(Path(__file__).parent.glob("*.h"))):
        key.update(source.read_bytes() + b"\0")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "slipstream" / "native" / f"{key.hexdigest()[:24]}.so"


@functools.cache
def _flags() -> tuple[str, ...]:
    return (*_FLAGS, "-fopenmp") if _openmp() is not None else _FLAGS


@functools.cache
def _openmp() -> str | None:
    """The GNU OpenMP runtime that torch has loaded, where it has."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            return next((line.split()[-1] for line in lines if "/libgomp" in line), None)
    except OSError:
        return None


@functools.cache
def _compiler() -> str | None:
    names = ("gcc",) if _openmp() is not None else ()  # others would call a runtime of their own
    return next((path for name in (*names, "cc") if (path := shutil.which(name))), None)


def _processor() -> str:
    """What -march=native looks at, so that a home folder may be shared between machines."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            facts = (line for line in lines if line.lower().startswith(("flags", "features", "model name", "cpu part")))
            return "".join(sorted(set(facts)))
    except OSError:
        return platform.processor()


def _enabled() -> bool:
    return os.environ.get("SLIPSTREAM_NATIVE") != "0"


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        return (error.stderr or b"").decode(errors="replace").strip()[-400:]
    return str(error)


SIGNATURES: dict[str, list[Any]] = {
    "slip_add_rms_norm": [POINTER, POINTER, POINTER, POINTER, POINTER, FLOAT, INT, INT],
    "slip_norm_heads": [POINTER, POINTER, POINTER, FLOAT, INT, INT, INT, INT],
    "slip_rope": [POINTER, POINTER, POINTER, INT, INT, INT, INT, INT],
    "slip_silu_and_mul": [POINTER, POINTER, INT, INT],
    "slip_gelu_tanh_and_mul": [POINTER, POINTER, INT, INT],
    "slip_write_cache": [POINTER, POINTER, POINTER, POINTER, POINTER, INT, INT, INT, INT],
    "slip_attend": [POINTER] * 8 + [FLOAT] * 2 + [INT] * 8,
    "slip_skinny_gemm": [POINTER] * 3 + [INT] * 3,
    "slip_low_bit": [POINTER] * 5 + [INT] * 4,
    "slip_decode_layers": [POINTER] * 8 + [INT],
}
_ANSWER = {"slip_low_bit", "slip_decode_layers"}  # whether there was memory
