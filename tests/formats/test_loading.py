import gc

import pytest

from slipstream.base.processes import loading


@pytest.fixture(autouse=True)
def collector():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_while_a_model_loads_and_what_it_made_never():
    count = gc.get_freeze_count()
    with loading():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= count + len(made)


def test_after_a_failure_garbage_is_collected_again():
    count = gc.get_freeze_count()
    with pytest.raises(ValueError), loading():
        raise ValueError
    assert gc.isenabled() and gc.get_freeze_count() == count


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    with loading():
        pass
    assert not gc.isenabled()
