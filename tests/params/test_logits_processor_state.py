"""process_dict_updates: the state of a logits processor by request follows its batch."""

from __future__ import annotations

from slipstream.params.processors import BatchUpdate, MoveDirectionality, process_dict_updates
from slipstream.params.sampling import SamplingParams

WITH, WITHOUT = SamplingParams(extra_args={"target": 7}), SamplingParams()


def target(params, prompt, output):
    return (params.extra_args or {}).get("target")


def test_state_follows_requests_that_come_go_and_move():
    entries: dict[int, int] = {}
    assert not process_dict_updates(entries, None, target)
    added = [(0, WITHOUT, [1], []), (1, WITH, [1], []), (2, WITH, None, [])]
    assert process_dict_updates(entries, BatchUpdate(3, [], added, []), target) and entries == {1: 7, 2: 7}
    moved = [(2, 0, MoveDirectionality.UNIDIRECTIONAL)]
    assert process_dict_updates(entries, BatchUpdate(2, [1], [], moved), target) and entries == {0: 7}
    swapped = [(0, 1, MoveDirectionality.SWAP)]
    assert process_dict_updates(entries, BatchUpdate(2, [], [], swapped), target) and entries == {1: 7}
    assert process_dict_updates(entries, BatchUpdate(2, [], [(1, WITHOUT, [1], [])], []), target) and entries == {}
    assert not process_dict_updates(entries, BatchUpdate(2, [1], [], []), target)
