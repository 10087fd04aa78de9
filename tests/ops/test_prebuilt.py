"""Compiled kernels of a wheel: the level for a processor; a wheel built here answers without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import gguf
import pytest

from child import child_env
from slipstream.ops.prebuilt import LEVELS, best_level, processor_features
from tiny import write_tiny
from tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
HASWELL = frozenset({"fpu", "sse", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
ICE_LAKE = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni"}


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        ("x86_64", ICE_LAKE | {"amx_tile", "amx_int8", "amx_bf16"}, "amx"),
        ("x86_64", ICE_LAKE | {"amx_tile"}, "avx512vnni"),
        ("x86_64", ICE_LAKE - {"avx512_vnni"}, "avx2"),
        ("x86_64", HASWELL | {"avx_vnni"}, "avxvnni"),
        ("x86_64", HASWELL, "avx2"),
        ("x86_64", HASWELL - {"fma"}, "baseline"),
        ("aarch64", frozenset({"asimd", "asimddp", "asimdrdm", "atomics"}), "dotprod"),
        ("aarch64", frozenset({"asimd"}), "baseline"),
    ],
)
def test_the_best_level_that_the_processor_has(machine, features, level):
    found = best_level(machine, features)
    assert found is not None and found.name == level


def test_other_machines_have_none():
    assert best_level("riscv64", ICE_LAKE) is None


def test_a_wheel_answers_without_a_compiler(tmp_path):
    machine = platform.machine()
    if machine not in LEVELS or shutil.which("gcc") is None:
        pytest.skip("wheels are built on Linux for x86_64 and aarch64, with gcc")
    level = best_level(machine, processor_features())
    assert level is not None
    flags = ["--arch", machine, "--level", level.name, "--out", str(tmp_path)]
    subprocess.run([sys.executable, ROOT / "scripts" / "wheel", *flags], check=True, env=child_env())
    (wheel,) = tmp_path.glob(f"slipstream-*-py3-none-manylinux_*_{machine}.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    code = (
        "from slipstream import LLM, SamplingParams; from slipstream.ops import native;"
        "from slipstream.scheduler.grammar import pool_library;"
        "assert pool_library.load() is not None;"
        f"assert native.state() == 'compiled, of the wheel ({machine}-{level.name})', native.state();"
        "llm = LLM(MODEL, skip_tokenizer_init=True, num_threads=1, use_tqdm_on_load=False);"
        "print(*llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),"
        " use_tqdm=False)[0].outputs[0].token_ids)"
    )
    model = write_gguf(write_tiny(tmp_path / "model"), gguf.GGMLQuantizationType.Q4_0)
    code = code.replace("MODEL", repr(str(model)))
    # before other import paths, through which dependencies may come
    path = os.pathsep.join([str(tmp_path / "installed"), *filter(None, sys.path)])
    no_compiler, cache = str(tmp_path / "empty"), str(tmp_path / "cache")
    (tmp_path / "empty").mkdir()
    answers = [
        subprocess.run([sys.executable, "-c", text], env=env, capture_output=True, text=True, check=False)
        for text, env in (
            (code, child_env(PYTHONPATH=path, PATH=no_compiler, XDG_CACHE_HOME=cache)),
            (code.replace("assert ", "unused = ").replace(", native.state();", ";"), child_env(SLIPSTREAM_NATIVE="0")),
        )
    ]
    assert answers[0].returncode == 0, answers[0].stderr
    assert answers[0].stdout and answers[0].stdout == answers[1].stdout, answers[1].stderr
