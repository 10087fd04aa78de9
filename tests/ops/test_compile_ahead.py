"""Calls made by forked processes for their effect, and zeros in memory nobody wrote."""

import gc
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from slipstream.ops import compile_ahead
from slipstream.ops.compile_ahead import ForkedCompiler, _kind, _ZeroFilled


def test_every_call_is_made_elsewhere_first_and_then_here(tmp_path):
    compiler = ForkedCompiler(3)

    def call(i):
        (tmp_path / f"{i}-{os.getpid()}").touch()
        return i * i

    futures = [compiler.submit(call, i) for i in range(7)]
    compiler.start()
    compiler.finish()
    assert [future.result(timeout=0) for future in futures] == [i * i for i in range(7)]
    made = [name.name.split("-") for name in tmp_path.iterdir()]
    assert len(made) == 14 and len({process for _, process in made}) > 3  # this one, and three others at least
    assert {i for i, process in made if int(process) == os.getpid()} == {str(i) for i in range(7)}


def test_a_call_does_not_wait_for_those_that_come_after_it(tmp_path):
    own, far = os.getpid(), tmp_path / "far"
    compiler = ForkedCompiler(1)

    def first():
        if os.getpid() != own:
            far.touch()

    compiler.submit(first)
    deadline = time.monotonic() + 20
    while not far.exists() and time.monotonic() < deadline:
        time.sleep(0.001)
    assert far.exists(), "nothing was done before the start"
    compiler.start()
    compiler.finish()


def test_there_are_no_more_processes_than_asked_for_while_calls_come(monkeypatch):
    forks = []
    monkeypatch.setattr(ForkedCompiler, "_fork", lambda self, calls: (forks.append(len(calls)), self._children.add(-1)))
    monkeypatch.setattr(compile_ahead, "_has_ended", lambda child: False)
    compiler = ForkedCompiler(1)
    for _ in range(5):
        compiler.submit(lambda: 3)
    assert forks == [1]
    compiler.start()
    assert forks == [1, 4]
    monkeypatch.setattr(compile_ahead, "_has_ended", lambda child: True)
    compiler.submit(lambda: 3)
    assert forks == [1, 4, 1]
    compiler.finish()


def test_a_process_that_becomes_free_gets_a_few_of_those_that_wait(monkeypatch):
    forks, ended = [], []
    monkeypatch.setattr(
        ForkedCompiler, "_fork", lambda self, calls: (forks.append(len(calls)), self._children.add(len(forks)))
    )
    monkeypatch.setattr(compile_ahead, "_has_ended", lambda child: child in ended)
    compiler = ForkedCompiler(2)
    for _ in range(6):
        compiler.submit(lambda: 3)
    ended.append(1)
    compiler.submit(lambda: 3)
    assert forks == [1, 1, 2]
    compiler.start()
    assert forks == [1, 1, 2, 2, 1]
    ended.extend(range(9))
    compiler.finish()


def test_nothing_is_collected_in_a_process_from_its_first_moment_on(tmp_path):
    """Others' callbacks come before any line of ours there, and a freed event of the device would end it."""
    states, watching = tmp_path / "states", [True]
    os.register_at_fork(after_in_child=lambda: watching and states.write_text(str(gc.isenabled())))
    compiler = ForkedCompiler(1)
    compiler.submit(lambda: states.write_text(f"{states.read_text()}, {gc.isenabled()}"))
    compiler.start()
    for child in compiler._children:
        os.waitpid(child, 0)
    watching.clear()
    assert states.read_text() == "False, False" and gc.isenabled()
    compiler.abandon()


def test_what_else_is_to_be_done_is_done_elsewhere_alone(tmp_path):
    compiler = ForkedCompiler(2, lambda result: (tmp_path / f"{result}-{os.getpid()}").touch())
    futures = [compiler.submit(lambda i=i: i) for i in range(3)]
    compiler.start()
    compiler.finish()
    assert [future.result(timeout=0) for future in futures] == [0, 1, 2]
    made = [name.name.split("-") for name in tmp_path.iterdir()]
    assert sorted(i for i, _ in made) == ["0", "1", "2"] and str(os.getpid()) not in {process for _, process in made}


def test_a_call_that_fails_fails_alone(tmp_path):
    compiler = ForkedCompiler(2)

    def fail():
        raise ValueError("no such instruction")

    bad, good = compiler.submit(fail), compiler.submit(lambda: 5)
    compiler.start()
    compiler.finish()
    assert good.result(timeout=0) == 5
    with pytest.raises(ValueError, match="no such instruction"):
        bad.result(timeout=0)


def test_a_process_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(compile_ahead, "PATIENCE", 0.05)
    own = os.getpid()
    compiler = ForkedCompiler(1)
    future = compiler.submit(lambda: "here" if os.getpid() == own else time.sleep(60))
    compiler.start()
    compiler.finish()
    assert future.result(timeout=0) == "here"


def test_an_abandoned_compiler_waits_for_nobody():
    own = os.getpid()
    compiler = ForkedCompiler(1)
    future = compiler.submit(lambda: None if os.getpid() == own else time.sleep(60))
    compiler.start()
    compiler.abandon()
    assert isinstance(future.exception(timeout=0), RuntimeError)
    compiler.finish()


def test_nothing_to_compile_is_no_trouble():
    compiler = ForkedCompiler(4)
    compiler.start()
    compiler.finish()


def test_memory_nobody_wrote_holds_zeros():
    with _ZeroFilled():
        made = [
            torch.empty(1000),
            torch.empty_like(torch.ones(1000)),
            torch.ones(2).new_empty(1000),
            torch.empty_strided((10, 10), (1, 10)),
        ]
        kept = torch.ones(3) * 2
    assert all(not tensor.any() for tensor in made) and kept.tolist() == [2, 2, 2]


def test_arguments_are_told_apart_by_what_programs_depend_on():
    x = torch.zeros(64, dtype=torch.float32)
    assert _kind(x) == _kind(x[4:]) != _kind(x[1:])
    assert _kind(x) != _kind(x.to(torch.int32)) and _kind(3) == 3
    assert isinstance(hash(_kind([x])), int)  # whatever comes


def test_descriptors_of_tensors_are_told_apart_by_their_blocks():
    @dataclass
    class Descriptor:
        base: torch.Tensor
        block_shape: list[int]

    one, same, other = (Descriptor(torch.zeros(4), [8, n]) for n in (64, 64, 32))
    assert _kind(one) == _kind(same) != _kind(other)
    assert _kind(one) != _kind(Descriptor(torch.zeros(4).long(), [8, 64]))


def test_nothing_large_is_imported_for_it():
    program = """
import sys, torch
from slipstream.ops.compile_ahead import _ZeroFilled
with _ZeroFilled():
    torch.empty(3)
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""
    subprocess.run([sys.executable, "-c", program], check=True)


PROGRAM = """
import os, sys
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from slipstream.ops.compile_ahead import can_compile_ahead, compiling_ahead

@triton.jit
def double(x, out, num, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < num) * 2, mask=at < num)

class Launcher:
    def __init__(self, src, metadata):
        open(os.path.join(sys.argv[1], f"{os.getpid()}"), "a").write("x")

class Driver:
    launcher_cls = Launcher
    def get_current_target(self): return GPUTarget("cuda", 90, 32)
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0

triton.runtime.driver.set_active(Driver())
assert can_compile_ahead()

def walk():
    for _ in range(5):
        for block in (64, 128):
            x = torch.empty(64)
            assert not x.any()
            out = torch.ones(64)
            double[(1,)](x, out, 64, BLOCK=block)
            assert out.all(), "it was launched"

with compiling_ahead(walk, 4):
    print("loading")
kernels = double.device_caches[0][0]
assert len(kernels) == 2 and all("cubin" in kernel.asm for kernel in kernels.values()), kernels
processes = os.listdir(sys.argv[1])
assert len(processes) == 2 and str(os.getpid()) not in processes, processes
print("ready")

double.device_caches[0][0].clear()
try:
    with compiling_ahead(walk, 4):
        raise KeyboardInterrupt
except KeyboardInterrupt:
    print("interrupted")

def walk_and_fail():
    walk()
    raise RuntimeError("the walk failed")

double.device_caches[0][0].clear()
try:
    with compiling_ahead(walk_and_fail, 4):
        print("never")
except RuntimeError:
    print("told")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_walk_compiles_each_variant_once_and_launches_nothing(tmp_path):
    """For a GPU that is not here, by the real compiler."""
    program, launchers = tmp_path / "walk.py", tmp_path / "launchers"
    program.write_text(PROGRAM)
    launchers.mkdir()
    env = {**os.environ, "PYTHONPATH": "src", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(program), str(launchers)], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["loading", "ready", "interrupted", "told"]
