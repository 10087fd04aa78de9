import gc
from types import SimpleNamespace

import pytest

from slipstream import LLM
from slipstream.engine.gc_freeze import frozen_gc
from slipstream.errors import EngineClosed


@pytest.fixture(autouse=True)
def nothing_frozen():
    """conftest.py freezes the objects of the collection."""
    gc.unfreeze()
    yield
    gc.freeze()


def test_what_was_there_is_left_alone_until_the_block_ends():
    with frozen_gc():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="no"), frozen_gc():
        raise ValueError("no")
    assert gc.get_freeze_count() == 0


def test_objects_that_the_process_froze_stay_frozen():
    gc.freeze()
    with frozen_gc():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() > 1000  # not the same number: a frozen object may be deleted


def test_generate_excludes_older_objects_from_its_first_line_on():
    seen = []

    def check_open():
        seen.append(gc.get_freeze_count())
        raise EngineClosed("as it is called first")

    llm = SimpleNamespace(_sync_loop=SimpleNamespace(check_open=check_open))
    with pytest.raises(EngineClosed):
        LLM._run(llm, None, [], None, False, None, None, None, add_special_tokens=True)
    assert seen[0] > 1000 and gc.get_freeze_count() == 0
