import gc

import pytest

from slipstream.engine.garbage import nothing_old


def test_what_was_there_is_left_alone_until_the_block_ends():
    with nothing_old():
        assert gc.get_freeze_count() > 1000
    assert gc.get_freeze_count() == 0


def test_an_error_ends_it_too():
    with pytest.raises(ValueError, match="no"), nothing_old():
        raise ValueError("no")
    assert gc.get_freeze_count() == 0
