import gc
from types import SimpleNamespace

import pytest

from slipstream import LLM
from slipstream.base import processes
from slipstream.base.errors import EngineClosed
from slipstream.base.processes import FrozenGc


@pytest.fixture(autouse=True)
def nothing_frozen():
    """conftest.py freezes the objects of the collection."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_there_is_left_alone_until_the_block_ends():
    with FrozenGc().block():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="no"), FrozenGc().block():
        raise ValueError("no")
    assert gc.get_freeze_count() == 0


def test_objects_that_the_process_froze_stay_frozen():
    gc.freeze()
    with FrozenGc().block():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() > 1000  # not the same number: a frozen object may be deleted


def test_the_outer_of_two_blocks_ends_it():
    frozen = FrozenGc()
    for _ in range(2):  # the second time too: what a block froze was not frozen by the process
        with frozen.block():
            with frozen.block():
                pass
            assert gc.get_freeze_count() > 1000
        assert gc.get_freeze_count() == 0


def test_objects_that_the_process_froze_are_counted_once(monkeypatch):
    counts = []

    def count():
        counts.append(1_000_000)
        return counts[-1]

    monkeypatch.setattr(gc, "get_freeze_count", count)
    frozen = FrozenGc()
    for _ in range(3):
        with frozen.block():
            pass
    assert len(counts) == 1  # Python visits each frozen object to count them


def test_generate_excludes_older_objects_from_its_first_line_on(monkeypatch):
    monkeypatch.setattr(processes.frozen_gc.__self__, "_is_left_to_process", False)
    seen = []

    def check_open():
        seen.append(gc.get_freeze_count())
        raise EngineClosed("as it is called first")

    llm = SimpleNamespace(_driver=SimpleNamespace(check_open=check_open))
    with pytest.raises(EngineClosed):
        LLM._run(llm, None, [], None, False, None, None, None, None, add_special_tokens=True)
    assert seen[0] > 1000 and gc.get_freeze_count() == 0
