"""Tasks made by forked processes for their effect, and zeros in memory that was never written."""

import gc
import importlib.util
import os
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest
import torch

from child import child_env
from patience import PATIENCE
from slipstream.ops.platform import compile_ahead
from slipstream.ops.platform.compile_ahead import ForkedCompiler, _kind, _ZeroFilled


class Note:
    """A task that writes down who did what with it."""

    def __init__(self, folder, name="task", made=False):
        self.folder = folder
        self.name = name
        self.made = made

    def is_made(self):
        return self.made

    def make(self):
        (self.folder / f"made-{self.name}-{os.getpid()}").touch()

    def read(self):
        (self.folder / f"read-{self.name}-{os.getpid()}").touch()


def notes(folder, kind):
    """Names and processes of what was made, or read."""
    found = [file.name.split("-", 2) for file in folder.iterdir()]
    return sorted((name, int(process)) for what, name, process in found if what == kind)


def test_every_task_is_made_elsewhere_and_read_here(tmp_path):
    compiler = ForkedCompiler(3)
    for i in range(7):
        compiler.submit(Note(tmp_path, i))
    compiler.start()
    compiler.finish()
    assert notes(tmp_path, "read") == [(str(i), os.getpid()) for i in range(7)]
    made = notes(tmp_path, "made")
    assert [name for name, _ in made] == [str(i) for i in range(7)]
    processes = {process for _, process in made}
    assert len(processes) >= 3 and os.getpid() not in processes


def test_a_task_does_not_wait_for_those_that_come_after_it(tmp_path):
    compiler = ForkedCompiler(1)
    compiler.submit(Note(tmp_path))
    deadline = time.monotonic() + PATIENCE
    while not notes(tmp_path, "made") and time.monotonic() < deadline:
        time.sleep(0.001)
    assert notes(tmp_path, "made"), "nothing was done before the start"
    compiler.start()
    compiler.finish()


def test_no_process_is_forked_for_what_an_earlier_run_has_made(tmp_path):
    compiler = ForkedCompiler(2)
    for i in range(3):
        compiler.submit(Note(tmp_path, i, made=True))
    compiler.start()
    assert not compiler._children and not notes(tmp_path, "read")
    compiler.finish()
    assert len(notes(tmp_path, "read")) == 3 and not notes(tmp_path, "made")


def forks_noted(monkeypatch, ended):
    """Sizes of the shares of processes that are numbered and never forked."""
    forks = []

    def fork(self, tasks, niceness=0):
        forks.append(len(tasks))
        self._children[len(forks)] = tasks

    monkeypatch.setattr(ForkedCompiler, "_fork", fork)
    monkeypatch.setattr(compile_ahead, "_has_ended", lambda child: child in ended)
    return forks


def test_there_are_no_more_processes_than_asked_for_while_tasks_come(monkeypatch, tmp_path):
    forks = forks_noted(monkeypatch, ended := set())
    compiler = ForkedCompiler(1)
    for i in range(5):
        compiler.submit(Note(tmp_path, i))
    assert forks == [1]
    compiler.start()
    assert forks == [1, 4]
    ended.update(range(9))
    compiler.submit(Note(tmp_path, 5))
    assert forks == [1, 4, 1]
    compiler.finish()
    assert len(notes(tmp_path, "read")) == 6


def test_those_that_come_first_go_first(tmp_path):
    """The longest comes first, and the end waits for it."""

    class Nice(Note):
        def make(self):
            while not (self.folder / "all-are-there").exists():
                time.sleep(0.001)
            (self.folder / f"nice-{self.name}-{os.nice(0)}").touch()

    compiler = ForkedCompiler(1)
    for i in range(2):
        compiler.submit(Nice(tmp_path, i))
    compiler.start()
    (tmp_path / "all-are-there").touch()
    compiler.finish()
    (_, first), (_, second) = notes(tmp_path, "nice")
    assert first == os.nice(0) < second


def test_a_process_that_becomes_free_gets_a_few_of_those_that_wait(monkeypatch, tmp_path):
    forks = forks_noted(monkeypatch, ended := set())
    compiler = ForkedCompiler(2)
    for _ in range(6):
        compiler.submit(Note(tmp_path))
    ended.add(1)
    compiler.submit(Note(tmp_path))
    assert forks == [1, 1, 2]
    compiler.start()
    assert forks == [1, 1, 2, 2, 1]
    ended.update(range(9))
    compiler.finish()


def test_what_one_process_has_made_is_read_while_others_go_on(monkeypatch, tmp_path):
    forks_noted(monkeypatch, ended := {2})
    compiler = ForkedCompiler(2)
    for name in ("long", "short"):
        compiler.submit(Note(tmp_path, name))
    compiler.start()
    compiler.finish(max_left=1)
    assert [name for name, _ in notes(tmp_path, "read")] == ["short"]
    ended.add(1)
    compiler.finish()
    assert [name for name, _ in notes(tmp_path, "read")] == ["long", "short"]


def test_a_process_that_has_more_than_one_task_left_is_not_left_alone(monkeypatch, tmp_path):
    forks_noted(monkeypatch, set())
    compiler = ForkedCompiler(1)
    first, second, third = (Note(tmp_path, i) for i in range(3))
    for task in (first, second, third):
        compiler.submit(task)
    compiler.start()
    polls = []
    monkeypatch.setattr(compile_ahead, "_has_ended", lambda child: child == 1)

    def sleep(seconds):
        polls.append(seconds)
        second.made = True

    monkeypatch.setattr(time, "sleep", sleep)
    compiler.finish(max_left=1)
    assert len(polls) == 1


def test_nothing_is_collected_in_a_process_from_its_first_moment_on(tmp_path):
    """Others' callbacks come before any line of ours there, and a freed event of the device would end it."""
    states, watching = tmp_path / "states", [True]

    class State(Note):
        def make(self):
            states.write_text(f"{states.read_text()}, {gc.isenabled()}")

    os.register_at_fork(after_in_child=lambda: watching and states.write_text(str(gc.isenabled())))
    compiler = ForkedCompiler(1)
    compiler.submit(State(tmp_path))
    compiler.start()
    for child in compiler._children:
        os.waitpid(child, 0)
    watching.clear()
    assert states.read_text() == "False, False" and gc.isenabled()
    compiler.abandon()


def test_a_task_that_fails_fails_alone(tmp_path):
    class Bad(Note):
        def make(self):
            raise ValueError("no such instruction")

        read = make

    compiler = ForkedCompiler(1)
    for task in (Note(tmp_path, 0), Bad(tmp_path), Note(tmp_path, 1)):
        compiler.submit(task)
    compiler.start()
    compiler.finish()
    assert len(notes(tmp_path, "made")) == len(notes(tmp_path, "read")) == 2


class Endless(Note):
    def make(self):
        time.sleep(60)


def test_a_process_that_hangs_is_not_waited_for(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_ahead, "FORK_TIMEOUT", 0.05)
    compiler = ForkedCompiler(1)
    compiler.submit(Endless(tmp_path))
    compiler.start()
    compiler.finish()
    assert notes(tmp_path, "read") == [("task", os.getpid())]


def test_an_abandoned_compiler_does_not_wait_and_reads_nothing(tmp_path):
    compiler = ForkedCompiler(1)
    for task in (Endless(tmp_path), Endless(tmp_path), Note(tmp_path, made=True)):
        compiler.submit(task)
    compiler.abandon()
    compiler.finish()
    assert not list(tmp_path.iterdir())


def test_an_interrupt_at_the_very_end_leaves_no_process_behind(tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setattr(compile_ahead, "start_triton", lambda: None)

    def finish(self, max_left=0):
        raise KeyboardInterrupt

    children = []
    with pytest.raises(KeyboardInterrupt), compile_ahead.compiling_ahead(lambda: None, 1) as compiler:
        compiler.submit(Endless(tmp_path))
        children += compiler._children
        monkeypatch.setattr(ForkedCompiler, "finish", finish)
    (child,) = children
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_nothing_to_compile_is_no_trouble():
    compiler = ForkedCompiler(4)
    compiler.start()
    compiler.finish()


def test_memory_that_was_never_written_holds_zeros():
    with _ZeroFilled():
        made = [
            torch.empty(1000),
            torch.empty_like(torch.ones(1000)),
            torch.ones(2).new_empty(1000),
            torch.empty_strided((10, 10), (1, 10)),
        ]
        kept = torch.ones(3) * 2
    assert all(not tensor.any() for tensor in made) and kept.tolist() == [2, 2, 2]


def test_arguments_are_distinguished_by_what_programs_depend_on():
    x = torch.zeros(64, dtype=torch.float32)
    assert _kind(x) == _kind(x[4:]) != _kind(x[1:])
    assert _kind(x) != _kind(x.to(torch.int32)) and _kind(3) == 3
    assert _kind((x, None)) == _kind((x[4:], None)) != _kind((x[1:], None))
    assert isinstance(hash(_kind([x])), int)  # whatever comes


def test_descriptors_of_tensors_are_distinguished_by_their_blocks():
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
from slipstream.ops.platform.compile_ahead import _ZeroFilled
with _ZeroFilled():
    torch.empty(3)
assert "sympy" not in sys.modules and "torch._dynamo" not in sys.modules, "torch's compiler was imported"
"""
    subprocess.run([sys.executable, "-c", program], env=child_env(), check=True)


PROGRAM = """
import os, sys, threading
import torch, triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from slipstream.ops.platform.compile_ahead import can_compile_ahead, compiling_ahead

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
            for num in (48, 64):  # one program serves both
                double[(1,)](x, out, num, BLOCK=block)
            assert out.all(), "it was launched"

with compiling_ahead(walk, 4):
    print("loading")
kernels = double.device_caches[0][0]
assert len(kernels) == 2 and all("cubin" in kernel.asm for kernel in kernels.values()), kernels
processes = os.listdir(sys.argv[1])
assert len(processes) == 2 and str(os.getpid()) not in processes, processes
assert all(os.path.getsize(os.path.join(sys.argv[1], process)) == 1 for process in processes), "made twice"
print("ready")

double.device_caches[0][0].clear()
with compiling_ahead(walk, 4):
    pass
assert len(double.device_caches[0][0]) == 2 and os.listdir(sys.argv[1]) == processes, "compiled again"
print("again")

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

# two at once: neither takes the other's stub for Triton's own
real = type(double).run
threads = [threading.Thread(target=lambda: compiling_ahead(walk, 1).__enter__()) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert type(double).run is real
print("both")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_walk_compiles_each_variant_once_and_launches_nothing(tmp_path):
    """For a GPU that is not here, by the real compiler."""
    program, launchers = tmp_path / "walk.py", tmp_path / "launchers"
    program.write_text(PROGRAM)
    launchers.mkdir()
    env = child_env(TRITON_CACHE_DIR=str(tmp_path / "cache"))
    env.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, str(program), str(launchers)], env=env, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["loading", "ready", "again", "interrupted", "told", "both"]
