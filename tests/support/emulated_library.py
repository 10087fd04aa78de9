"""EmulatedLibrary: the C kernels for an x86-64 processor that this machine is not, run by qemu.

It has the functions of the compiled library (`ops/platform/native.py`), so the ops call it as they call that one.
Functions whose arguments are structures of pointers (a whole decode step, the inputs of a step) are not emulated.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.ops.platform import native
from slipstream.ops.platform.prebuilt import FLAGS, INCLUDES, LEVELS

COMPILER, EMULATOR = "x86_64-linux-gnu-gcc", "qemu-x86_64"
LIBRARIES = "/usr/x86_64-linux-gnu"  # of the cross compiler, on Debian
_STRUCTURES = {"slip_gather_inputs", "slip_decode_layers"}


class EmulatedLibrary:
    def __init__(self, level: str, folder: Path) -> None:
        (flags,) = (found.flags for found in LEVELS["x86_64"] if found.name == level)
        names = [name for name in native.SIGNATURES if name not in _STRUCTURES]
        (folder / "names.h").write_text("".join(f"NAME({name})\n" for name in names))
        # results do not depend on the optimisation (tests/ops/test_native_bits.py), and this compiles sooner
        flags = ("-O1", *(flag for flag in (*FLAGS, *flags) if flag != "-O3"), *INCLUDES, f"-I{folder}")
        sources = [Path(__file__).with_name("emulated_call.c"), *native._sources()]
        jobs = [
            subprocess.Popen([COMPILER, *flags, "-c", source, "-o", folder / f"{number}.o"])
            for number, source in enumerate(sources)
        ]
        codes = [job.wait() for job in jobs]
        assert not any(codes), "the kernels do not compile"
        objects = [folder / f"{number}.o" for number in range(len(sources))]
        subprocess.run([COMPILER, *objects, "-lm", "-o", folder / "kernels"], check=True)
        self._process = subprocess.Popen(
            [EMULATOR, "-cpu", "max", "-L", LIBRARIES, folder / "kernels"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._sizes: dict[int, int] = {}  # bytes behind each address that an op has asked for

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on ops call this library. They pass addresses: the memory behind each is remembered."""
        address_of = torch.Tensor.data_ptr

        def data_ptr(tensor: torch.Tensor) -> int:
            address, storage = address_of(tensor), tensor.untyped_storage()
            self._sizes[address] = storage.data_ptr() + storage.nbytes() - address
            return address

        monkeypatch.setattr(torch.Tensor, "data_ptr", data_ptr)
        monkeypatch.setattr(native, "library", lambda: self)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def __getattr__(self, name: str) -> Callable[..., int]:
        kinds = native.SIGNATURES[name]
        assert name not in _STRUCTURES, f"{name} is not emulated"
        return lambda *arguments: self._call(name, list(zip(kinds, arguments, strict=True)))

    def _call(self, name: str, arguments: list[tuple[Any, Any]]) -> int:
        message = [_int(len(name)), name.encode(), _int(len(arguments))]
        buffers = []
        for kind, value in arguments:
            if kind is native.POINTER:
                size = self._sizes[value] if value else 0
                buffers.append((value, size))
                message += [b"p", _int(size), ctypes.string_at(value, size) if size else b""]
            else:
                message.append(b"i" + _int(value) if kind is native.INT else b"f" + struct.pack("<f", value))
        pipe = self._process
        assert pipe.stdin is not None and pipe.stdout is not None
        pipe.stdin.write(b"".join(message))
        pipe.stdin.flush()
        result: int = struct.unpack("<q", pipe.stdout.read(8))[0]
        for address, size in buffers:
            if size:
                ctypes.memmove(address, pipe.stdout.read(size), size)
        return result


def _int(value: int) -> bytes:
    return struct.pack("<q", value)


def can_emulate() -> bool:
    programs = shutil.which(COMPILER), shutil.which(EMULATOR)
    return None not in programs and os.path.isdir(LIBRARIES)
