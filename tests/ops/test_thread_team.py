"""Number of threads of decode steps beside other programs, on scripted machines."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from slipstream.ops import native

SOURCE = """
#include "{folder}/native_team.h"
void start(SlipTeam *team, int64_t most) {{
    *team = (SlipTeam){{.most = most, .size = most, .wait = TEAM_WAIT}};
}}
int64_t add(SlipTeam *team, int64_t rows, double seconds, int64_t late, double now) {{
    slip_team_add(team, rows, seconds, (int)late, now);
    return team->size;
}}
void add_gemm(SlipTeam *team, double seconds, int64_t late) {{ slip_team_add_gemm(team, seconds, (int)late); }}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = native._compiler()
    if compiler is None:
        pytest.skip("no C compiler here")
    folder = tmp_path_factory.mktemp("team")
    source, made = folder / "team.c", folder / "team.so"
    source.write_text(SOURCE.format(folder=Path(native.__file__).parent))
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", source, "-o", made], check=True)
    found = ctypes.CDLL(str(made))
    found.add.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_int64, ctypes.c_double]
    found.add.restype = ctypes.c_int64
    found.add_gemm.argtypes = [ctypes.c_void_p, ctypes.c_double, ctypes.c_int64]
    return found


class Machine:
    """`cores` cores. A program that spins on a core of a thread makes each step wait for it."""

    def __init__(self, library, cores, num_threads):
        self.library, self.cores, self.others, self.now = library, cores, 0, 0.0
        self.pauses = 0.0  # seconds that a thread is late in every second step
        self.steps = 0
        self.team = ctypes.create_string_buffer(256)
        library.start(self.team, ctypes.c_int64(num_threads))
        self.size = num_threads

    def step_seconds(self):
        shared = max(0, self.size + self.others - self.cores)  # threads that share their core
        work = 0.016 / self.size
        if not shared:
            return work + (self.pauses if self.is_late() else 0)
        return 0.016 + 0.004 * shared if self.size > 1 else 0.032  # four waits of 4 ms, or half of a core

    def is_late(self):
        return self.size > 1 and (self.size + self.others > self.cores or (self.pauses > 0 and self.steps % 2 == 0))

    def run(self, seconds, rows=1):
        """Returns the mean time of a step."""
        end, first, steps = self.now + seconds, self.now, 0
        while self.now < end:
            took = self.step_seconds()
            late = self.is_late()
            self.now += took
            self.steps += 1
            self.size = self.library.add(self.team, rows, took, late, self.now)
            steps += 1
        return (self.now - first) / steps


def test_all_threads_run_while_no_thread_is_late(library):
    machine = Machine(library, 4, 4)
    assert machine.run(10) == pytest.approx(0.004) and machine.size == 4


@pytest.mark.parametrize("others", [1, 2, 3])
def test_programs_that_spin_get_cores_and_threads_come_back(library, others):
    machine = Machine(library, 4, 4)
    machine.run(2)
    machine.others = others
    machine.run(2.8)
    assert machine.size == 4 - others
    assert machine.run(60) < 1.1 * 0.016 / (4 - others)  # trials of more threads are rare
    machine.others = 0
    machine.run(70)
    assert machine.size == 4 and machine.run(5) == pytest.approx(0.004)


@pytest.mark.parametrize("others", [1, 2, 3])
def test_programs_that_begin_to_spin_are_noticed_at_once(library, others):
    machine = Machine(library, 4, 4)
    machine.run(2)
    machine.others = others
    machine.run(0.2 * others)  # 10, 8 and 7 steps with four threads
    assert machine.size == 4 - others


def test_the_fastest_number_stays_where_every_core_is_shared(library):
    machine = Machine(library, 4, 4)
    machine.others = 4
    machine.run(3)
    assert machine.size == 2  # 24 ms; 4 threads: 32, 3: 28, 1: 32
    assert machine.run(60) < 1.1 * 0.024


def test_threads_that_are_late_now_and_then_stay(library):
    machine = Machine(library, 2, 2)
    machine.pauses = 0.003  # 9.5 ms with two threads, 16 with one
    assert machine.run(60) < 1.02 * 0.0095 and machine.size == 2


def test_threads_come_back_though_they_are_late_now_and_then(library):
    machine = Machine(library, 2, 2)
    machine.others = 1
    machine.run(5)
    assert machine.size == 1
    machine.others, machine.pauses = 0, 0.003
    machine.run(8.5)
    assert machine.size == 2 and machine.run(60) < 1.02 * 0.0095


def test_a_program_that_spins_after_refused_trials_is_noticed_at_once(library):
    machine = Machine(library, 4, 4)
    machine.pauses = 0.0005
    machine.run(60)
    assert machine.size == 4
    machine.others = 1
    machine.run(0.5)
    assert machine.size == 3


def test_times_of_other_numbers_of_rows_are_not_compared(library):
    machine = Machine(library, 4, 4)
    machine.others = 1
    while machine.size == 4:
        machine.run(0.03)
    machine.run(0.001, rows=2)  # in the middle of a search
    assert machine.size == 4
    machine.run(3, rows=2)
    assert machine.size == 3


class HeadMachine(Machine):
    """Where a core is shared, the LM head waits for its thread and the layers do not."""

    def step_seconds(self):
        is_shared = self.size + self.others > self.cores
        self.library.add_gemm(self.team, 0.012 if is_shared else 0.002 / self.size, is_shared)
        return 0.008 / self.size * (1.2 if is_shared else 1)

    def is_late(self):
        return False


@pytest.mark.parametrize("others", [1, 2])
def test_the_lm_head_counts(library, others):
    machine = HeadMachine(library, 4, 4)
    machine.run(2)
    machine.others = others
    machine.run(0.5)
    assert machine.size == 4 - others


def test_one_thread_stays_one(library):
    machine = Machine(library, 1, 1)
    machine.others = 3
    machine.run(5)
    assert machine.size == 1
