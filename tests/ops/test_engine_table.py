"""How engines on the same cores divide them, with a table in memory and times that the test sets."""

from __future__ import annotations

import ctypes
import os
import subprocess
from pathlib import Path

import pytest

from slipstream.ops.platform import native

SOURCE = """
#include <stdlib.h>
#include "{folder}/native_team.h"
void *start(void *table, int64_t owner, int64_t cores) {{
    SlipNeighbours *me = calloc(1, sizeof *me);
    *me = (SlipNeighbours){{.table = table, .owner = owner, .cores = {{cores}}}};
    return me;
}}
void *open_table(double now) {{
    SlipNeighbours *me = calloc(1, sizeof *me);
    slip_engines_open(me, now);
    return me;
}}
int64_t is_shared(SlipNeighbours *me) {{ return me->table != NULL; }}
int64_t threads(SlipNeighbours *me, int64_t most, double seconds, double now) {{
    return slip_engines_threads(me, most, seconds, now);
}}
"""
STEP = 0.003  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="module")
def library(folder):
    compiler = native._compiler()
    if compiler is None:
        pytest.skip("no C compiler here")
    source, made = folder / "engines.c", folder / "engines.so"
    source.write_text(SOURCE.format(folder=Path(native.__file__).parent))
    define = f'-DSLIP_ENGINES_FOLDER="{folder}"'
    subprocess.run([compiler, "-O1", "-fPIC", "-shared", define, source, "-o", made], check=True)
    found = ctypes.CDLL(str(made))
    found.start.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    found.open_table.argtypes = [ctypes.c_double]
    found.start.restype = found.open_table.restype = ctypes.c_void_p
    found.threads.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_double, ctypes.c_double]
    found.is_shared.argtypes = [ctypes.c_void_p]
    found.threads.restype = found.is_shared.restype = ctypes.c_int64
    return found


class Machine:
    def __init__(self, library):
        self.library, self.now, self.count = library, 1000.0, 0
        self.table = ctypes.create_string_buffer(1 << 16)

    def add(self, cores, num_threads):
        self.count += 1
        return self.library.start(self.table, self.count, cores), num_threads

    def run(self, seconds, *engines):
        """The numbers of threads of the last steps of engines that run for so long."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            found = [self.library.threads(engine, most, STEP, self.now) for engine, most in engines]
        return found


@pytest.fixture
def machine(library) -> Machine:
    return Machine(library)


def test_one_engine_has_all_its_threads(machine):
    assert machine.run(1, machine.add(0b1111, 4)) == [4]


@pytest.mark.parametrize(("num_engines", "expected"), [(2, [2, 2]), (3, [1, 1, 2]), (4, [1] * 4), (5, [1] * 5)])
def test_engines_on_the_same_cores_divide_them(machine, num_engines, expected):
    engines = [machine.add(0b1111, 4) for _ in range(num_engines)]
    assert machine.run(2 * STEP, *engines) == expected


def test_the_cores_of_an_engine_that_pauses_go_to_the_other(machine):
    first, second = machine.add(0b1111, 4), machine.add(0b1111, 4)
    machine.run(1, first, second)
    assert machine.run(0.1, first) == [4]
    assert machine.run(2 * STEP, first, second) == [2, 2]


def test_an_engine_counts_until_the_end_of_a_long_step(machine):
    first, second = machine.add(0b1111, 4), machine.add(0b1111, 4)
    machine.run(STEP, first, second)
    machine.library.threads(second[0], 4, 0.5, machine.now)
    assert machine.run(0.4, first) == [2]
    assert machine.run(0.3, first) == [4]


def test_an_engine_with_few_threads_leaves_the_rest(machine):
    assert machine.run(2 * STEP, machine.add(0b11111111, 8), machine.add(0b11111111, 2)) == [6, 2]


def test_engines_on_other_cores_do_not_count(machine):
    assert machine.run(2 * STEP, machine.add(0b0011, 2), machine.add(0b1100, 2)) == [2, 2]


def test_an_engine_whose_slot_was_taken_gets_another(machine):
    idle = machine.add(0b1111, 4)
    machine.run(STEP, idle)
    machine.now += 10
    others = [machine.add(0b1111, 4) for _ in range(2)]  # the first one takes the slot of the idle engine
    machine.run(STEP, *others)
    assert machine.run(2 * STEP, idle, *others) == [2, 1, 1]


def test_without_a_free_slot_an_engine_has_all_its_threads(machine):
    engines = [machine.add(1, 1) for _ in range(32)]
    assert machine.run(STEP, *engines, machine.add(0b1111, 4)) == [1] * 32 + [4]


def test_a_table_of_times_after_now_is_from_before_a_restart(machine):
    machine.now = 1e6
    machine.run(STEP, *[machine.add(0b1111, 4) for _ in range(32)])
    machine.now = 100.0
    assert machine.run(STEP, machine.add(0b1111, 4)) == [4]


def test_engines_of_one_user_open_one_table(library, folder):
    first, second = library.open_table(5.0), library.open_table(6.0)
    assert library.is_shared(first) and library.is_shared(second)
    path = folder / f"slipstream-engines-1-{os.getuid()}"
    assert path.stat().st_mode & 0o777 == 0o600
    cores = len(os.sched_getaffinity(0))
    for _ in range(2):
        found = [library.threads(engine, cores, STEP, 7.0) for engine in (first, second)]
    assert sum(found) == max(cores, 2)


def test_without_a_folder_for_the_table_an_engine_has_all_its_threads(library, folder):
    path = folder / f"slipstream-engines-1-{os.getuid()}"
    path.unlink(missing_ok=True)
    path.symlink_to(folder / "elsewhere")  # never followed
    engine = library.open_table(8.0)
    path.unlink()
    assert not library.is_shared(engine) and not (folder / "elsewhere").exists()
    assert library.threads(engine, 4, STEP, 9.0) == 4
