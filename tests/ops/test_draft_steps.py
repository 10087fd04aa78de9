"""Recurrent ops with drafts, by references and kernels: outputs of accepted tokens are those of the plain references,
whatever is drafted, with chunks between and saves on the way."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from hand_steps import StepRow, hand_steps
from slipstream.contracts.cache_spec import replay_columns, ring_columns
from slipstream.ops.recurrent import DeltaWeights, DraftSteps, RecurrentSteps, SelectiveWeights, SsdWeights
from slipstream.ops.recurrent import delta_rule as delta_reference
from slipstream.ops.recurrent import replay as conv_reference
from slipstream.ops.recurrent import ssm as ssm_reference
from slipstream.ops.recurrent import steps as steps_reference

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
VERSIONS = pytest.mark.parametrize("version", ["reference", "kernel"])
DRAFTS, ROWS, SLOTS = 3, 4, 7  # the rows' own slots, the last for padding, then saves


class Ops(NamedTuple):
    conv: Any
    delta: Any
    ssm: Any
    steps: Any


def ops(version: str) -> Ops:
    if version == "reference":
        return Ops(conv_reference, delta_reference, ssm_reference, steps_reference)
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent import conv1d_triton as conv
    from slipstream.ops.recurrent import delta_triton as delta
    from slipstream.ops.recurrent import ssm_triton as ssm
    from slipstream.ops.recurrent import steps_triton as steps

    return Ops(conv, delta, ssm, steps)


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE)


def garbage(*shape: int) -> torch.Tensor:
    return torch.full(shape, torch.nan, device=DEVICE)


WIDTH, HEADS, KEY_DIM, DIM, STATE = 4, 2, 8, 20, 12
CHANNELS = 2 * KEY_DIM + HEADS * DIM


class Mixer:
    """`size` numbers per token go in. `states` are as `state_fields` declares them."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.size = {"conv": CHANNELS, "delta": CHANNELS + 2 * HEADS, "ssd": HEADS * DIM + 2 * STATE + HEADS}.get(
            kind, 3 * DIM + 2 * STATE
        )
        self.weight, self.bias = rand(CHANNELS, WIDTH), rand(CHANNELS)
        self.delta = DeltaWeights(rand(CHANNELS, WIDTH), rand(HEADS), rand(HEADS), rand(DIM), 1e-3)
        self.ssd = SsdWeights(rand(HEADS), rand(HEADS), rand(HEADS), 0.01, 2.0)
        self.selective = SelectiveWeights(rand(DIM, STATE), rand(DIM), rand(DIM))

    def new_states(self, num_drafts: int) -> dict[str, torch.Tensor]:
        columns = ring_columns(WIDTH, num_drafts)
        states = {
            "conv": {"conv": garbage(SLOTS, CHANNELS, columns)},
            "delta": {"conv": garbage(SLOTS, CHANNELS, columns), "state": garbage(SLOTS, HEADS, KEY_DIM, DIM)},
            "ssd": {"state": garbage(SLOTS, HEADS, DIM, STATE)},
            "selective": {"state": garbage(SLOTS, DIM, STATE)},
        }[self.kind]
        sizes = {"delta": 2 * HEADS, "ssd": HEADS * DIM + STATE + HEADS, "selective": 2 * DIM + STATE}
        if num_drafts and self.kind in sizes:
            states["replay"] = garbage(ROWS, replay_columns(num_drafts), sizes[self.kind])
        return states

    def run(self, ops: Ops, states: dict[str, torch.Tensor], steps: RecurrentSteps, x: torch.Tensor) -> torch.Tensor:
        replay = states.get("replay")
        if self.kind == "conv":
            return ops.conv.causal_conv1d(x, self.weight, self.bias, states["conv"], steps, "silu")
        if self.kind == "delta":
            qkv, b, a = x.split([CHANNELS, HEADS, HEADS], 1)
            z = torch.ones(len(x), HEADS * DIM, device=DEVICE)
            if steps.is_single:
                return ops.delta.delta_decode(qkv, z, b, a, self.delta, states["conv"], states["state"], steps, replay)
            if replay is not None:
                ops.delta.delta_replay_(states["state"], states["conv"], replay, self.delta, steps)
            mixed = ops.conv.causal_conv1d(qkv, self.delta.conv, None, states["conv"], steps, "silu")
            q, k, v = mixed.split([KEY_DIM, KEY_DIM, HEADS * DIM], 1)
            g, beta = ops.delta.delta_gates(a, b, self.delta.a_log, self.delta.dt_bias)
            heads = [part.unflatten(1, (-1, KEY_DIM)) for part in (q, k)]
            out = ops.delta.gated_delta_rule(
                *heads, v.unflatten(1, (-1, DIM)), g, beta, states["state"], steps, KEY_DIM**-0.5
            )
            gate = z.unflatten(1, (-1, DIM))
            return delta_reference.gated_rms_norm(out, gate, self.delta.norm, self.delta.eps).flatten(1)
        if self.kind == "ssd":
            inner, b, c, dt = x.split([HEADS * DIM, STATE, STATE, HEADS], 1)
            b, c = b.unflatten(1, (1, STATE)), c.unflatten(1, (1, STATE))
            inner = inner.unflatten(1, (HEADS, DIM))
            return ops.ssm.ssd_scan(inner, dt, b, c, self.ssd, states["state"], steps, replay).flatten(1)
        inner, dt, z, b, c = x.split([DIM, DIM, DIM, STATE, STATE], 1)
        return ops.ssm.selective_scan(inner, dt, b, c, z, self.selective, states["state"], steps, replay)


class Engine:
    """Runs steps with drafts over the true inputs of some rows and wrong ones in between."""

    def __init__(self, mixer: Mixer, ops: Ops, *lengths: int) -> None:
        self.mixer, self.ops = mixer, ops
        self.x = {row: rand(length, mixer.size) for row, length in enumerate(lengths)}
        whole = mixer.new_states(0)
        plain = Ops(conv_reference, delta_reference, ssm_reference, steps_reference)
        self.expected = {row: self.whole(plain, whole, row) for row in self.x}
        self.states = mixer.new_states(DRAFTS)
        self.table = torch.zeros(ROWS, dtype=torch.int32, device=DEVICE)
        self.replays = dict.fromkeys(range(ROWS), 0)

    def whole(self, plain: Ops, states: dict[str, torch.Tensor], row: int) -> torch.Tensor:
        tokens = range(len(self.x[row]))
        steps = (hand_steps([StepRow(row, token, 1)], device=DEVICE) for token in tokens)
        return torch.cat([self.mixer.run(plain, states, step, self.x[row][[t]]) for t, step in enumerate(steps)])

    def step(
        self,
        rows: list[tuple[int, int, int, int]],
        saves: dict[int, tuple[int, int]] | None = None,
        *,
        padded: bool = False,
    ) -> None:
        """`rows`: (row, first position, tokens, how many of them are right). The tokens of a row are drafts, unless
        some row has more than `DRAFTS + 1` of them. `saves`: row to (slot, position)."""
        is_single = all(count <= DRAFTS + 1 for _, _, count, _ in rows)
        parts = [self.x[row][first : first + right] for row, first, _, right in rows]
        parts = [
            torch.cat([part, rand(count - len(part), self.mixer.size)])
            for part, (_, _, count, _) in zip(parts, rows, strict=True)
        ]
        lines = [(row, first + at, 1) for row, first, count, _ in rows for at in range(count)]
        offsets = np.array([at for _, _, count, _ in rows for at in range(count)], np.int32)
        if not is_single:
            lines, offsets = [(row, first, count) for row, first, count, _ in rows], np.zeros(len(rows), np.int32)
        padding = 2 if padded else 0
        chunk_saves = {} if is_single else {row: {position: slot} for row, (slot, position) in (saves or {}).items()}
        hand = hand_steps(
            [StepRow(row, first, count, chunk_saves.get(row, {})) for row, first, count in lines],
            padding=padding,
            padding_slot=ROWS - 1,
            device=DEVICE,
            chunked=not is_single,
        )
        wanted = np.full((len(lines) + padding, 2), -1, np.int32)
        for row, save in (saves or {}).items():
            wanted[[line[0] for line in lines].index(row)] = save
        offsets = np.concatenate([offsets, np.zeros(padding, np.int32)])
        made, positions = self.ops.steps.advance_bases_(
            self.table,
            hand.slots.long(),
            hand.starts,
            hand.first_positions.long(),
            torch.tensor(offsets, dtype=torch.int64, device=DEVICE) if is_single else None,
            torch.tensor(wanted, device=DEVICE),
            is_single,
        )
        bound = DRAFTS + 1 if padded else max(self.replays[row] for row, *_ in rows)
        drafts = DraftSteps(*made, bound, None if padded else offsets)
        saved = made.save_slots if is_single else None
        steps = replace(hand, **positions._asdict(), save_slots=saved, drafts=drafts)
        total = int(steps.starts[-1])
        x = torch.cat([*parts, rand(total - sum(map(len, parts)), self.mixer.size)])
        out = self.mixer.run(self.ops, self.states, steps, x)
        begin = 0
        for row, first, count, right in rows:
            torch.testing.assert_close(
                out[begin : begin + right], self.expected[row][first : first + right], rtol=2e-4, atol=2e-4
            )
            begin += count
            self.replays[row] = count if is_single and count > 1 else 0

    def restore(self, row: int, slot: int, position: int) -> None:
        """The row continues from a save, with the text of the row that saved it."""
        for name, state in self.states.items():
            if name != "replay":
                state[row] = state[slot]
        self.table[row], self.replays[row] = position, 0


KINDS = pytest.mark.parametrize("kind", ["conv", "delta", "ssd", "selective"])


@KINDS
@VERSIONS
def test_rejected_drafts_leave_no_trace(kind: str, version: str) -> None:
    """Three rows save their states at 64: one in the replay of a decode step, one in the replay before a chunk, one as
    a row without drafts."""
    engine = Engine(Mixer(kind), ops(version), 72, 68, 68)
    engine.step([(0, 0, 1, 1), (1, 0, 60, 60)])
    engine.step([(0, 1, 4, 2), (1, 60, 4, 3)])  # partly accepted
    engine.step([(0, 3, 3, 1), (1, 63, 3, 2)], {1: (5, 64)}, padded=True)
    engine.step([(0, 4, 2, 2), (1, 65, 2, 1)], {1: (5, 64)})  # wholly accepted; the replay passes the save
    engine.step([(0, 6, 56, 56), (2, 0, 63, 63)])  # a chunk follows drafts, and a row stays behind
    engine.step([(2, 63, 1, 1), (0, 62, 4, 3)], {2: (6, 64), 0: (4, 64)})
    engine.step([(1, 66, 1, 1), (0, 65, 6, 6)], {0: (4, 64)})
    for row, slot in ((0, 4), (1, 5), (2, 6)):
        engine.restore(row, slot, 64)
    engine.step([(0, 64, 2, 1), (1, 64, 1, 1), (2, 64, 2, 2)])
    engine.step([(0, 65, 1, 1), (2, 66, 1, 1)])


@KINDS
@VERSIONS
def test_last_positions_are_computed_again(kind: str, version: str) -> None:
    """After steps with drafts and without, after chunks, and several times; as rows with drafts and without, and as the
    first token of a chunk. One row saves its state in a chunk, one in a replay."""
    engine = Engine(Mixer(kind), ops(version), 80, 76, 68)
    engine.step([(0, 0, 1, 1), (1, 0, 60, 60)])
    engine.step([(0, 0, 1, 1), (1, 59, 1, 1)])
    engine.step([(0, 0, 1, 1), (1, 59, 4, 1)])
    engine.step([(0, 0, 4, 2), (1, 59, 1, 1)], padded=True)
    engine.step([(0, 0, 3, 3), (1, 59, 3, 3)])  # all drafts of row 1 are accepted
    engine.step([(0, 3, 4, 1), (1, 62, 4, 1)], padded=True)
    engine.step([(0, 3, 4, 1), (1, 62, 1, 1)], {1: (5, 64)})
    engine.step([(0, 3, 59, 59), (1, 62, 1, 1)], {1: (5, 64)})  # its state is before the chunk
    engine.step([(0, 61, 8, 8), (1, 63, 1, 1), (2, 0, 60, 60)], {1: (5, 64)})  # its state has seen the chunk's first
    engine.step([(0, 68, 2, 1), (1, 63, 1, 1), (2, 59, 4, 2)], {1: (5, 64)}, padded=True)
    engine.step([(0, 68, 1, 1), (1, 63, 3, 2), (2, 61, 4, 4)], {1: (5, 64), 2: (6, 64)})
    engine.step([(0, 68, 3, 1), (1, 65, 3, 2), (2, 61, 4, 4)], {1: (5, 64), 2: (6, 64)}, padded=True)
    engine.step([(0, 68, 2, 2), (1, 65, 9, 9), (2, 65, 1, 1)], {2: (6, 64)})
    engine.restore(1, 5, 64)
    engine.restore(2, 6, 64)
    engine.step([(0, 70, 2, 2), (1, 64, 4, 1), (2, 64, 1, 1)])
    engine.step([(0, 72, 1, 1), (1, 64, 1, 1), (2, 64, 2, 2)], padded=True)


@VERSIONS
def test_bases_of_random_steps(version: str) -> None:
    rng = random.Random(1)
    for _ in range(10):
        num_rows = rng.randint(1, 60)
        counts = [rng.choice([1, 1, 2, 5]) for _ in range(num_rows)]
        rows = rng.sample(range(99), num_rows)
        table = torch.randint(0, 9, (100,), dtype=torch.int32, device=DEVICE)
        before, firsts = table.tolist(), [max(0, int(table[row]) + rng.randint(-1, 4)) for row in rows]
        draws = [
            (row, first, at) for row, first, count in zip(rows, firsts, counts, strict=True) for at in range(count)
        ]
        saves = [(rng.choice([-1, 120]), rng.randint(1, 12)) for _ in draws]

        def ints(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=DEVICE)

        made, positions = ops(version).steps.advance_bases_(
            table,
            ints([row for row, _, _ in draws], torch.int64),
            ints(range(len(draws) + 1)),
            ints([first + at for _, first, at in draws], torch.int64),
            ints([at for _, _, at in draws], torch.int64),
            ints(saves),
            True,
        )
        assert all(field.dtype == torch.int32 for field in positions)
        assert positions.slots.tolist() == [row for row, _, _ in draws]
        assert positions.first_positions.tolist() == [first + at for _, first, at in draws]
        seen, index = positions.seen_positions, 0
        for row, first, count in zip(rows, firsts, counts, strict=True):
            after = max(first + 1 if count == 1 else first, before[row])
            assert seen[index : index + count].tolist() == [max(first, before[row]), *range(first + 1, first + count)]
            assert int(table[row]) == after and int(made.bases[index]) == before[row]
            assert made.counts[index : index + count].tolist() == [count] + [0] * (count - 1)
            assert made.offsets[index : index + count].tolist() == list(range(count))
            slot, position = saves[index]
            passed = before[row] < position <= after
            assert int(made.save_slots[index]) == (slot if passed else -1)
            assert (made.save_slots[index + 1 : index + count] == -1).all()
            index += count
