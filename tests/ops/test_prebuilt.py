"""Compiled kernels of a wheel: the level for a processor; a wheel built here answers without a compiler."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest

from child import child_env
from slipstream import LLM, SamplingParams
from slipstream.ops.platform import native, prebuilt
from slipstream.ops.platform.prebuilt import LEVELS, processor_features, usable_levels
from tiny import write_tiny
from tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
HASWELL = frozenset({"fpu", "sse", "avx", "avx2", "abm", "bmi1", "bmi2", "f16c", "fma", "movbe"})
SKYLAKE_SERVER = HASWELL | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
CASCADE_LAKE = SKYLAKE_SERVER | {"avx512_vnni"}
ICE_LAKE = CASCADE_LAKE | {"avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_bitalg", "avx512_vpopcntdq"}
SAPPHIRE_RAPIDS = ICE_LAKE | {"avx_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16"}
AMX = {"amx_tile", "amx_int8", "amx_bf16"}
GRAVITON2 = frozenset({"asimd", "asimddp", "asimdrdm", "atomics"})


@pytest.mark.parametrize(
    ("machine", "features", "level"),
    [
        pytest.param("x86_64", SAPPHIRE_RAPIDS, "amx", id="Sapphire Rapids"),
        pytest.param("x86_64", SAPPHIRE_RAPIDS - AMX, "avx512vnni", id="Sapphire Rapids, a VM without AMX"),
        pytest.param("x86_64", SAPPHIRE_RAPIDS - {"amx_bf16"}, "avx512vnni", id="AMX without bfloat16"),
        pytest.param("x86_64", ICE_LAKE | {"amx_tile"}, "avx512vnni", id="AMX without products"),
        pytest.param("x86_64", ICE_LAKE, "avx512vnni", id="Ice Lake"),
        pytest.param("x86_64", CASCADE_LAKE, "avx512vnni", id="Cascade Lake: no bfloat16"),
        pytest.param("x86_64", ICE_LAKE | {"avx512_bf16"}, "avx512vnni", id="Zen 4"),
        pytest.param("x86_64", ICE_LAKE | {"avx512_bf16", "avx_vnni"}, "avx512vnni", id="Zen 5"),
        pytest.param("x86_64", SKYLAKE_SERVER, "avx512", id="Skylake: AVX-512 without VNNI"),
        pytest.param("x86_64", HASWELL | {"avx512f", "avx512cd", "avx512er"}, "avx2", id="Xeon Phi"),
        pytest.param("x86_64", HASWELL | {"avx_vnni"}, "avxvnni", id="Alder Lake"),
        pytest.param("x86_64", HASWELL, "avx2", id="Haswell, Zen 1 to 3"),
        pytest.param("x86_64", HASWELL - {"fma"}, "baseline", id="no FMA"),
        pytest.param("aarch64", GRAVITON2, "dotprod", id="Graviton 2"),
        pytest.param("aarch64", frozenset({"asimd"}), "baseline", id="Cortex-A72"),
    ],
)
def test_a_processor_gets_the_best_level_that_it_has(machine, features, level, tmp_path, monkeypatch):
    assert usable_levels(machine, features)[0].name == level
    write_levels(tmp_path, machine, *(other.name for other in LEVELS[machine]))
    assert find_on(machine, features, tmp_path, monkeypatch) == tmp_path / f"{machine}-{level}.so"


def test_a_wheel_without_the_best_level_gives_the_next(tmp_path, monkeypatch):
    write_levels(tmp_path, "x86_64", "avx512vnni", "avx2", "baseline")
    found = [
        find_on("x86_64", features, tmp_path, monkeypatch) for features in (SAPPHIRE_RAPIDS, HASWELL | {"avx_vnni"})
    ]
    assert [path.stem for path in found] == ["x86_64-avx512vnni", "x86_64-avx2"]


def test_a_level_that_the_processor_lacks_is_never_taken(tmp_path, monkeypatch):
    write_levels(tmp_path, "x86_64", "amx", "avx512vnni", "avxvnni")
    assert find_on("x86_64", HASWELL, tmp_path, monkeypatch) is None


def test_other_machines_have_none():
    assert usable_levels("riscv64", ICE_LAKE) == []


def write_levels(folder, machine, *names):
    for name in names:
        (folder / f"{machine}-{name}.so").touch()


def find_on(machine, features, folder, monkeypatch):
    monkeypatch.setattr(prebuilt, "FOLDER", folder)
    monkeypatch.setattr(prebuilt, "processor_features", lambda: features)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: machine)
    return prebuilt.find()


@pytest.mark.slow
def test_a_wheel_answers_without_a_compiler(tmp_path, monkeypatch):
    machine = platform.machine()
    if machine not in LEVELS or shutil.which("gcc") is None:
        pytest.skip("wheels are built on Linux for x86_64 and aarch64, with gcc")
    level = usable_levels(machine, processor_features())[0]
    flags = ["--arch", machine, "--level", level.name, "--out", str(tmp_path)]
    subprocess.run([sys.executable, ROOT / "scripts" / "wheel", *flags], check=True, env=child_env())
    (wheel,) = tmp_path.glob(f"slipstream-*-py3-none-manylinux_*_{machine}.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run([*install, "--target", tmp_path / "installed", wheel], check=True, env=child_env())
    model = str(write_gguf(write_tiny(tmp_path / "model"), gguf.GGMLQuantizationType.Q4_0))
    options = dict(skip_tokenizer_init=True, num_threads=1, use_tqdm_on_load=False)
    params = dict(temperature=0, max_tokens=5, ignore_eos=True)
    code = (
        "from slipstream import LLM, SamplingParams; from slipstream.ops.platform import native;"
        "from slipstream.scheduler.grammar import mask_pool;"
        "assert mask_pool.load() is not None;"
        f"assert native.state() == 'compiled, of the wheel ({machine}-{level.name})', native.state();"
        f"llm = LLM({model!r}, **{options});"
        f"print(llm.generate([[1, 2, 3]], SamplingParams(**{params}), use_tqdm=False)[0].outputs[0].token_ids)"
    )
    # before other import paths, through which dependencies may come
    path = os.pathsep.join([str(tmp_path / "installed"), *filter(None, sys.path)])
    (tmp_path / "empty").mkdir()
    no_compiler = child_env(PYTHONPATH=path, PATH=str(tmp_path / "empty"), XDG_CACHE_HOME=str(tmp_path / "cache"))
    answer = subprocess.run([sys.executable, "-c", code], env=no_compiler, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr
    monkeypatch.setattr(native, "library", lambda: None)
    monkeypatch.setattr(native, "build", lambda: False)
    monkeypatch.setattr(native, "build_in_background", lambda: None)
    with LLM(model, dequantize=True, **options) as llm:  # by torch: no kernel that an earlier test has chosen
        (wanted,) = llm.generate([[1, 2, 3]], SamplingParams(**params), use_tqdm=False)
    assert answer.stdout.strip() == str(wanted.outputs[0].token_ids)


def run_wheel(script, *flags, path="", python=()):
    command = [sys.executable, *python, str(script), *flags]
    return subprocess.run(command, capture_output=True, text=True, env=child_env() | {"PATH": path})


@pytest.mark.skipif(platform.machine() not in LEVELS, reason="wheels are built on x86_64 and aarch64")
def test_a_missing_compiler_is_a_note_and_an_old_one_is_found_before_compiling(tmp_path):
    script = ROOT / "scripts" / "wheel"
    done = run_wheel(script, "--out", str(tmp_path / "out"), path=str(tmp_path))
    notes = done.stderr.splitlines()
    assert done.returncode == 1 and len(notes) == len(LEVELS) and all("gcc is not installed" in each for each in notes)
    gcc = tmp_path / "gcc"
    gcc.write_text(f"#!/bin/sh\necho $@ >> {tmp_path}/calls; echo 'unknown: -march' >&2; exit 1\n")
    gcc.chmod(0o755)
    machine = platform.machine()
    done = run_wheel(script, "--arch", machine, path=f"{tmp_path}:{os.environ['PATH']}")
    level = LEVELS[machine][0].name
    why = f"gcc cannot compile for {level}, install a newer one (unknown: -march)"
    assert done.stderr == f"scripts/wheel: no wheel for {machine}: {why}\n"
    assert done.returncode == 1 and "-fsyntax-only" in (tmp_path / "calls").read_text()


def test_a_fresh_checkout_is_set_up_first(tmp_path):
    """By any Python that has none of the packages."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "src").symlink_to(ROOT / "src")
    script = shutil.copy(ROOT / "scripts" / "wheel", tmp_path / "scripts")
    setup = tmp_path / "scripts" / "setup"
    python = tmp_path / ".venv" / "bin" / "python"
    made = f"mkdir -p {python.parent}; printf '#!/bin/sh\\necho run by it: $@' > {python}; chmod +x {python}"
    setup.write_text(f"#!/bin/sh\n{made}\n")
    setup.chmod(0o755)
    done = run_wheel(script, "--arch", "x86_64", path=os.environ["PATH"], python=("-I", "-S"))
    assert done.returncode == 0 and done.stdout == f"run by it: {script} --arch x86_64\n", done.stderr
