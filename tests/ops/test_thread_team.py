"""Number of threads of decode steps beside other programs, on scripted machines."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from slipstream.ops.platform import native

SOURCE = """
#include "{folder}/native_team.h"
void start(SlipTeam *team, int64_t most) {{
    *team = slip_team_of(most);
}}
int64_t add(SlipTeam *team, int64_t rows, double seconds, int64_t late, double now) {{
    slip_team_add(team, rows, seconds, (int)late, now);
    return team->size;
}}
int64_t choose(SlipTeam *team, int64_t rows) {{ return slip_team_choose(team, rows); }}
void add_gemm(SlipTeam *team, int64_t rows, double seconds, int64_t late, double now) {{
    slip_team_add_gemm(team, rows, seconds, late == 1, late > 0, now);
}}
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
    found.add_gemm.argtypes = found.add.argtypes
    found.choose.argtypes, found.choose.restype = [ctypes.c_void_p, ctypes.c_int64], ctypes.c_int64
    return found


class Machine:
    """`cores` cores. A program that spins on a core of a thread makes each step wait for it."""

    def __init__(self, library, cores, num_threads):
        self.library, self.cores, self.others, self.now = library, cores, 0, 0.0
        self.pauses = 0.0  # seconds that a thread is late in every second step
        self.steps = 0
        self.team = ctypes.create_string_buffer(512)
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
        self.library.add_gemm(self.team, 1, 0.012 if is_shared else 0.002 / self.size, is_shared, self.now)
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


class PromptMachine(Machine):
    """GEMMs of prompts, one after the other, for which threads wait while a core is shared."""

    def prompt(self, num_gemms, rows=4):
        """Returns the seconds that they take."""
        start = self.now
        for _ in range(num_gemms):
            size = self.library.choose(self.team, rows)
            is_late = size > 1 and size + self.others > self.cores
            took = 0.016 if is_late else 0.0008 / size
            self.now += took
            self.library.add_gemm(self.team, rows, took, is_late, self.now)
        self.size = self.library.choose(self.team, rows)
        return self.now - start


@pytest.mark.parametrize("rows", [4, 480])
@pytest.mark.parametrize("others", [1, 2])
def test_a_prompt_beside_programs_that_spin_gives_them_cores(library, others, rows):
    machine = PromptMachine(library, 4, 4)
    machine.others = others
    assert machine.prompt(120, rows) < 0.12 * others  # 1.92 s with four threads
    assert machine.size == 4 - others
    machine.now += 1
    assert machine.prompt(120, rows) < 0.16  # one more thread is tried
    assert machine.size == 4 - others
    machine.others = 0
    for _ in range(12):
        machine.now += 1
        machine.prompt(120, rows)
    assert machine.size == 4


def test_half_of_the_threads_stay_in_prompts(library):
    machine = PromptMachine(library, 4, 4)
    machine.others = 4
    machine.prompt(120)
    assert machine.size == 2


def test_long_prompts_have_a_number_of_threads_of_their_own(library):
    machine = PromptMachine(library, 4, 4)
    machine.others = 1
    machine.prompt(120, rows=480)
    assert [library.choose(machine.team, rows) for rows in (1, 64, 65)] == [4, 4, 3]


def test_a_few_late_gemms_take_no_thread_away(library):
    machine = PromptMachine(library, 4, 4)
    for _ in range(50):
        machine.others = 1
        machine.prompt(2)
        machine.others = 0
        machine.prompt(6)
        assert machine.size == 4


def test_the_lm_head_of_a_step_is_no_prompt(library):
    machine, waited = Machine(library, 4, 4), 2
    for _ in range(40):
        library.add_gemm(machine.team, 1, 0.0005, waited, machine.now)
        machine.now += 0.0045
        assert library.add(machine.team, 1, 0.004, 0, machine.now) == 4


def test_a_prompt_does_not_take_part_in_a_trial_of_steps(library):
    machine = Machine(library, 4, 4)
    machine.others = 1
    machine.run(3)
    assert machine.size == 3
    while machine.size == 3:  # until four are tried
        machine.run(0.001)
    assert library.choose(machine.team, 1) == 4  # the LM head of the step
    assert library.choose(machine.team, 9) == 3


def test_one_thread_stays_one(library):
    machine = Machine(library, 1, 1)
    machine.others = 3
    machine.run(5)
    assert machine.size == 1
