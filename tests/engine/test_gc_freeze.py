import gc

import pytest

from slipstream.engine.gc_freeze import frozen_gc


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
