"""StateStore: restores, and what recurrent layers learn of a step, padded and not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from slipstream.config.buffer_size import max_saves
from slipstream.config.config import StateConfig
from slipstream.contracts.cache_spec import StateField, StateSpec
from slipstream.contracts.step import NO_INTS, StatePlan, StepPlan
from slipstream.device.device import Device
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.ops.recurrent import RecurrentSteps
from slipstream.runner.features import Gathered, Size
from slipstream.runner.staging import HostRing
from slipstream.runner.stores import StateStore

SPECS = (
    StateSpec((StateField("matrix", (2, 3), "float64"), StateField("conv", (5,), "float32"))),
    StateSpec((StateField("matrix", (4,), "float64"),)),
    StateSpec((StateField("matrix", (2, 3), "float64"), StateField("conv", (5,), "float32"))),
)
NUM_ROWS, NUM_CHECKPOINTS = 5, 3  # the last row is the padding row


@pytest.fixture
def device() -> Device:
    return Device(0, 1)


@pytest.fixture
def store(device: Device) -> StateStore:
    return StateStore(StateConfig(SPECS, NUM_CHECKPOINTS, 64, 1024), NUM_ROWS, device)


def plan(num_tokens: list[int], lengths: list[int], states: StatePlan | None = None) -> StepPlan:
    ints = np.array
    count = len(num_tokens)
    return StepPlan(
        step=0, released=NO_INTS, admitted=(), rows=ints([3, 0, 1][:count], np.int32),
        num_tokens=ints(num_tokens, np.int32), lengths=ints(lengths, np.int32), num_drawn=np.zeros(count, np.int32),
        num_host_tokens=ints(num_tokens, np.int32), tokens=np.zeros(sum(num_tokens), np.int32), new_pages=(),
        states=states,
    )  # fmt: skip


def saves(*lines: tuple[int, int, int]) -> StatePlan:
    return StatePlan(np.zeros((0, 2), np.int32), np.array(lines, np.int32).reshape(-1, 3))


def steps_of(store: StateStore, device: Device, plan: StepPlan, size: Size | None = None) -> RecurrentSteps:
    """What the store makes of a plan, as the runner asks for it."""
    ring = HostRing(2, 1 << 14, device)
    upload = ring.open()
    add = store.join_forward(plan, upload, size).add
    upload.send(device.compute)
    num_rows, num_tokens = (len(plan.rows), plan.total_tokens) if size is None else (size.rows, size.tokens)
    rows = torch.full((num_rows,), NUM_ROWS - 1)
    rows[: len(plan.rows)] = torch.from_numpy(plan.rows)
    lengths = torch.zeros(num_rows, dtype=torch.int64)
    lengths[: len(plan.rows)] = torch.from_numpy(plan.lengths)
    ends = np.cumsum(plan.num_tokens)
    starts = torch.full((num_rows + 1,), int(ends[-1]), dtype=torch.int32)
    starts[: len(ends) + 1] = torch.tensor([0, *ends])
    view = BatchView(
        ids=torch.zeros(num_tokens, dtype=torch.int64), positions=lengths - 1 if num_tokens == num_rows else
        torch.zeros(num_tokens, dtype=torch.int64), lengths=lengths, slots=(), page_tables=(),
        num_tokens=plan.num_tokens, max_lengths=plan.lengths, num_single=0, query_starts=starts,
    )  # fmt: skip
    context = ForwardContext(view, None, None, [], ())
    with FakeTensorMode(allow_non_fake_inputs=True):
        add(Gathered(view, rows), context)  # reads no value on the host
    return add(Gathered(view, rows), context).recurrent


def test_a_checkpoint_is_copied_to_a_row_at_every_site(store: StateStore, device: Device) -> None:
    for number, tensor in enumerate(store.tensors.values()):
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) + 1000 * number)
    before = {key: tensor.clone() for key, tensor in store.tensors.items()}
    upload = HostRing(2, 1 << 12, device).open()
    store.apply(plan([1], [65], StatePlan(np.array([[3, 2], [0, 0]], np.int32), np.zeros((0, 3), np.int32))))
    store.flush(upload)
    upload.send(device.compute)
    for key, tensor in store.tensors.items():
        assert torch.equal(tensor[3], before[key][NUM_ROWS + 2]) and torch.equal(tensor[0], before[key][NUM_ROWS])
        assert torch.equal(tensor[1:3], before[key][1:3]) and torch.equal(tensor[4:], before[key][4:])
    store.apply(plan([1], [66]))
    store.flush(upload)  # nothing is restored twice
    assert torch.equal(store.sites[1]["matrix"], store.tensors[SPECS[1], "matrix"][:, 0])
    assert torch.equal(store.sites[2]["conv"], store.tensors[SPECS[0], "conv"][:, 1])


def test_steps_of_one_token_per_row(store: StateStore, device: Device) -> None:
    steps = steps_of(store, device, plan([1, 1], [64, 9], saves((0, 64, 2))))
    assert steps.is_single and steps.chunks is None
    assert steps.slots.tolist() == [3, 0] and steps.starts.tolist() == [0, 1, 2]
    assert steps.first_positions.tolist() == [63, 8]
    assert steps.save_slots is not None and steps.save_slots.tolist() == [NUM_ROWS + 2, -1]
    assert steps_of(store, device, plan([1, 1], [64, 9])).save_slots is None
    padded = steps_of(store, device, plan([1, 1], [64, 9], saves((1, 64, 0))), Size(4, 4))
    assert padded.slots.tolist() == [3, 0, 4, 4] and padded.save_slots is not None
    assert padded.save_slots.tolist() == [-1, NUM_ROWS, -1, -1]
    unused = steps_of(store, device, plan([1, 1], [64, 9]), Size(4, 4)).save_slots
    assert unused is not None and unused.tolist() == [-1] * 4  # of the same size, so that the step can be captured


def test_steps_with_chunks(store: StateStore, device: Device) -> None:
    planned = plan([1, 70, 3], [128, 134, 3], saves((0, 128, 1), (1, 128, 0)))
    for size in (None, Size(100, 4)):
        steps = steps_of(store, device, planned, size)
        assert not steps.is_single and steps.save_slots is None
        assert steps.chunks is not None and steps.chunk_starts is not None
        used = steps.chunks[steps.chunks[:, 0] >= 0].tolist()
        assert used == [[0, 0, 1, NUM_ROWS + 1], [1, 1, 64, NUM_ROWS], [1, 65, 6, -1], [2, 71, 3, -1]]
        assert steps.chunk_starts[:4].tolist() == [0, 1, 3, 4]
        assert steps.first_positions[:3].tolist() == [127, 64, 0]
    assert max_saves(100, 4) >= 4


def test_padded_steps_upload_arrays_of_one_size(store: StateStore, device: Device) -> None:
    """Whatever is saved: the address of what follows in the arena must not depend on it."""
    ring = HostRing(2, 1 << 14, device)
    ends = []
    for states in (None, saves((0, 128, 1)), saves((0, 128, 1), (1, 128, 0))):
        upload = ring.open()
        store.join_forward(plan([1, 70, 3], [128, 134, 3], states), upload, Size(100, 4))
        ends.append(upload.put(np.zeros(1, np.int32)).start)
    assert len(set(ends)) == 1


@pytest.mark.parametrize("defers", [False, True])
def test_recurrent_layers_learn_what_the_stored_states_have_seen(device: Device, defers: bool) -> None:
    """A row may compute its last position again, and the host does not know it: plans have upper bounds of lengths."""
    field = StateField("deferred", (2, 3, 8), "float32", is_saved=False)
    specs = (StateSpec((*SPECS[0].fields, field)),) if defers else SPECS
    store = StateStore(StateConfig(specs, NUM_CHECKPOINTS, 64, 1024), NUM_ROWS, device)
    ring = HostRing(2, 1 << 14, device)

    def admit(row: int, num_cached: int) -> None:
        upload = ring.open()
        admission: Any = SimpleNamespace(row=row, num_cached=num_cached)
        store.apply(replace(plan([1], [1]), admitted=(admission,)))
        store.flush(upload)
        upload.send(device.compute)

    def seen(num_tokens: list[int], lengths: list[int], size: Size | None = None) -> list[int]:
        """Before the step, of rows 3 and 0 and of padding."""
        return steps_of(store, device, plan(num_tokens, lengths), size).seen_positions.tolist()

    admit(3, 64)
    admit(0, 0)
    assert seen([70, 5], [134, 5]) == [64, 0]
    assert seen([1, 1], [134, 6]) == [134, 5]  # row 3 computes position 133 again
    assert seen([1, 1], [135, 7], Size(4, 4)) == [134, 5 if defers else 6, 0, 0]
    assert seen([1, 1], [136, 8]) == [134 if defers else 135, 5 if defers else 7]
    assert seen([1, 1], [136, 8]) == [136, 8]  # both compute the last position of a period again
    assert seen([1, 2], [137, 9], Size(8, 4)) == [136, 8, 0, 0]  # and row 0 the first of two
    assert seen([1, 1], [137, 10]) == [137, 9]
    admit(0, 128)
    assert seen([1, 1], [138, 129]) == [137, 128]
