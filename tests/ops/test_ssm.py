"""Scans of Mamba-1 and Mamba-2 over packed rows: against transformers, and chunked against recurrent."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.mamba.modeling_mamba import mamba_selective_scan
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan

from hand_steps import REPEATING_STEPS, SeenPositions, StepRow, hand_steps
from nets.host_reads import no_host_reads
from slipstream.ops.recurrent import SelectiveWeights, SsdWeights, ssm

CUDA = torch.cuda.is_available()
# the interpreter's own use of numpy
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
HEADS, GROUPS, DIM, STATE, SLOTS = 4, 2, 6, 5, 9
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
KINDS = pytest.mark.parametrize("kind", ["ssd", "selective"])
LIMITS = (0.2, 1.5)  # of dt: both are reached


def ops(version: str) -> Any:
    if version == "reference":
        return ssm
    pytest.importorskip("triton", reason="triton is not installed")
    if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("no GPU, and triton was imported before its interpreter could be chosen")
    from slipstream.ops.recurrent import ssm_triton as kernels

    return kernels


class Scan:
    """Inputs of some rows by slot, and the outputs of each row computed token by token."""

    def __init__(
        self, kind: str, lengths: dict[int, int], dtype: torch.dtype = torch.float32, version: str = "reference"
    ) -> None:
        torch.manual_seed(len(lengths))
        self.kind, self.dtype, self.version = kind, dtype, version
        self.device = "cuda" if CUDA and version == "kernel" else "cpu"
        self.guard: Callable[[], AbstractContextManager[Any]] = nullcontext
        is_ssd = kind == "ssd"
        channels, shape = HEADS * DIM, (HEADS, DIM, STATE) if is_ssd else (HEADS * DIM, STATE)
        width = HEADS if is_ssd else channels
        self.weights: Any
        if is_ssd:
            self.weights = SsdWeights(self.rand(width) * 0.5, self.rand(width), self.rand(width), *LIMITS)
        else:
            self.weights = SelectiveWeights(self.rand(width, STATE) * 0.5, self.rand(width), self.rand(width))
        self.state = torch.full((SLOTS, 2, *shape), torch.nan, dtype=dtype, device=self.device)[:, 1]
        self.inputs = {slot: self.random(n) for slot, n in lengths.items()}
        self.expected = {slot: self.by_token(*inputs) for slot, inputs in self.inputs.items()}

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=self.dtype, device=self.device)

    def random(self, n: int) -> list[torch.Tensor]:
        if self.kind == "ssd":
            return [
                self.rand(n, HEADS, DIM), self.rand(n, HEADS), self.rand(n, GROUPS, STATE), self.rand(n, GROUPS, STATE)
            ]  # fmt: skip
        channels = HEADS * DIM
        return [
            self.rand(n, channels), self.rand(n, channels), self.rand(n, STATE), self.rand(n, STATE),
            self.rand(n, channels),
        ]  # fmt: skip

    def by_token(self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *z: torch.Tensor):
        """The definition."""
        dt, a = F.softplus(dt + self.weights.dt_bias), -self.weights.a_log.exp()
        if self.kind == "ssd":
            dt = dt.clamp(*LIMITS)
            b, c = (part.repeat_interleave(HEADS // GROUPS, 1)[:, :, None] for part in (b, c))
            dt, a, d = dt[..., None, None], a[:, None, None], self.weights.d[:, None]
        else:
            b, c, dt, d = b[:, None], c[:, None], dt[..., None], self.weights.d
        held, out = torch.zeros(self.state.shape[1:], dtype=self.dtype, device=self.device), []
        for t in range(len(x)):
            held = held * (dt[t] * a).exp() + dt[t] * x[t][..., None] * b[t]
            out.append((held * c[t]).sum(-1) + d * x[t])
        return torch.stack(out) * (F.silu(z[0]) if z else 1.0)

    def run(self, rows: list[StepRow], chunked: bool = False, **padding: int) -> None:
        steps = hand_steps(rows, device=self.device, chunked=chunked, **padding)
        total = max(padding.get("num_tokens", 0), int(steps.num_tokens.sum()))
        spans = [(row.slot, slice(row.first, row.first + row.count)) for row in rows]
        packed = []
        for part in range(len(next(iter(self.inputs.values())))):
            found = torch.cat([self.inputs[slot][part][span] for slot, span in spans])
            packed.append(torch.full((total, *found.shape[1:]), torch.nan, dtype=self.dtype, device=self.device))
            packed[-1][: len(found)] = found
        module = ops(self.version)
        scan = module.ssd_scan if self.kind == "ssd" else module.selective_scan
        with self.guard():
            out = scan(*packed, self.weights, self.state, steps)
        expected = torch.cat([self.expected[slot][span] for slot, span in spans])
        assert out.dtype == expected.dtype
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(out[: len(expected)], expected, rtol=tolerance, atol=tolerance)
        if not steps.is_single:
            assert not out[len(expected) :].any(), "tokens of no row must get zeros"


@pytest.mark.parametrize("length", [1, 5, 64, 150])
def test_the_definition_of_mamba2_is_what_transformers_computes(length: int) -> None:
    scan = Scan("ssd", {1: length})
    x, dt, b, c = (part[None] for part in scan.inputs[1])
    weights = scan.weights
    out = mamba2_chunk_scan(
        x, dt, -weights.a_log.exp(), b, c, chunk_size=32, D=weights.d, dt_bias=weights.dt_bias, dt_softplus=True,
        dt_limit=LIMITS,
    )  # fmt: skip
    torch.testing.assert_close(out[0], scan.expected[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("length", [1, 5, 80])
def test_the_definition_of_mamba1_is_what_transformers_computes(length: int) -> None:
    scan = Scan("selective", {1: length})
    x, dt, b, c, z = (part.T[None] for part in scan.inputs[1])
    weights = scan.weights
    out = mamba_selective_scan(
        x, dt, -weights.a_log.exp(), b, c, D=weights.d, z=z, delta_bias=weights.dt_bias, delta_softplus=True
    )
    torch.testing.assert_close(out[0].T, scan.expected[1], rtol=1e-4, atol=1e-4)


@KINDS
def test_on_a_gpu_no_value_is_read_on_the_host(kind: str) -> None:
    scan = Scan(kind, {1: 200, 4: 70, 2: 3})
    scan.guard = no_host_reads
    scan.run([StepRow(4, 0, 1), StepRow(1, 0, 67, {64: 5})])
    scan.run([StepRow(4, 1, 1), StepRow(1, 67, 1), StepRow(2, 0, 1)], padding=2)
    scan.run([StepRow(2, 1, 1), StepRow(4, 2, 66), StepRow(1, 68, 60)], padding=1, num_tokens=140)


@KINDS
@pytest.mark.parametrize(
    ("version", "dtype"), [("reference", torch.float32), ("reference", torch.float64), ("kernel", torch.float32)]
)
def test_rows_cut_anywhere_equal_the_definition(kind: str, version: str, dtype: torch.dtype) -> None:
    """Cuts inside chunks, at their borders, single tokens among chunks, padding."""
    scan = Scan(kind, {1: 200, 4: 70, 2: 3}, dtype, version)
    scan.run([StepRow(4, 0, 1), StepRow(1, 0, 67)])
    scan.run([StepRow(4, 1, 1), StepRow(1, 67, 1), StepRow(2, 0, 1)], padding=2)
    scan.run([StepRow(2, 1, 1), StepRow(4, 2, 66), StepRow(1, 68, 60)], padding=1, num_tokens=140)
    scan.run([StepRow(4, 68, 1), StepRow(1, 128, 64)])
    scan.run([StepRow(2, 2, 1), StepRow(4, 69, 1), StepRow(1, 192, 1)], chunked=True)
    scan.run([StepRow(1, 193, 7)])


@KINDS
@pytest.mark.parametrize("version", ["reference", "kernel"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_save_continues_as_its_row_does(kind: str, version: str, chunked: bool) -> None:
    scan = Scan(kind, {1: 200, 4: 200, 2: 70}, version=version)
    if chunked:
        rows = [StepRow(2, 0, 10), StepRow(1, 0, 130, {64: 5, 128: 6}), StepRow(4, 0, 64, {64: 7})]
        scan.run(rows, padding=1)
        resumed = {5: (1, 64), 6: (1, 128), 7: (4, 64)}
    else:
        scan.run([StepRow(1, 0, 63), StepRow(4, 0, 127)])
        scan.run([StepRow(1, 63, 1, {64: 5}), StepRow(4, 127, 1, {128: 7}), StepRow(2, 0, 1)])
        resumed = {5: (1, 64), 7: (4, 128)}
    for slot, (source, _) in resumed.items():
        scan.inputs[slot], scan.expected[slot] = scan.inputs[source], scan.expected[source]
    scan.run([StepRow(slot, first, 2) for slot, (_, first) in resumed.items()])
    scan.run([StepRow(slot, first + 2, 1) for slot, (_, first) in resumed.items()])
    untouched = [slot for slot in range(SLOTS) if slot not in {0, 1, 2, 4, *resumed}]
    assert scan.state[untouched].isnan().all()


@KINDS
@pytest.mark.parametrize("version", ["reference", "kernel"])
def test_positions_computed_again_change_no_result(kind: str, version: str) -> None:
    scan = Scan(kind, {3: 8, 4: 13, 5: 130, 6: 4}, version=version)
    seen, states = SeenPositions(), {}
    for number, spans in enumerate(REPEATING_STEPS):
        saves = {5: {64: 8 if number == 6 else 7}} if spans.get(5) == (63, 1) else {}
        scan.run(seen.rows(spans, saves))
        if saves:
            states[number] = scan.state[5].clone()
    first, again = states.values()
    assert first.equal(again) and scan.state[7].equal(first) and scan.state[8].equal(first)


def test_chunks_of_a_16_bit_model_equal_the_reference() -> None:
    """Views of one wide tensor; a head of two blocks, sizes that are no powers of 2, a row that begins inside a chunk.
    The interpreter has no products of bfloat16."""
    kernel, heads, groups, dim, size = ops("kernel"), 6, 2, 40, 20
    device = "cuda" if CUDA else "cpu"
    torch.manual_seed(0)
    rows = [StepRow(2, 7, 1), StepRow(1, 50, 40, {64: 5}), StepRow(3, 0, 66)]
    steps = hand_steps(rows, device=device, num_tokens=110)
    mixed = torch.randn(110, heads * dim + 2 * groups * size + heads + 2, device=device).half()
    parts = mixed.split([heads * dim, groups * size, groups * size, heads, 2], 1)[:4]
    x, b, c = (p.unflatten(1, (n, -1)) for p, n in zip(parts[:3], (heads, groups, groups), strict=True))
    weights = SsdWeights(*torch.randn(3, heads, device=device).unbind(0))
    state = torch.randn(SLOTS, heads, dim, size, device=device)
    expected_state = state.clone()
    out = kernel.ssd_scan(x, parts[3], b, c, weights, state, steps)
    expected = ssm.ssd_scan(*(p.float() for p in (x, parts[3], b, c)), weights, expected_state, steps)
    assert out.dtype is torch.float16
    for made, wanted in ((out.float(), expected), (state, expected_state)):
        assert (made - wanted).norm() < 1e-3 * wanted.norm()
