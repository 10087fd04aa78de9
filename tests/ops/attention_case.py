"""Cases of paged attention: rows of a paged cache, attention over them, and plain float64 beside it."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

CUDA = torch.cuda.is_available()
if not CUDA and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("no GPU, and triton was imported before its interpreter could be chosen", allow_module_level=True)

from hand_cache import one_group  # noqa: E402
from slipstream.nn.context import BatchView, ForwardContext  # noqa: E402
from slipstream.nn.paged_attention import TritonAttention  # noqa: E402
from slipstream.ops.attention.decode import MAX_ROW_PROGRAMS  # noqa: E402
from slipstream.ops.attention.tile_list import FEW_ROWS, SOME_ROWS  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass
class Case:
    """Rows with `counts` new tokens at the end of `lengths` positions; a length of 0 is padding."""

    lengths: list[int]
    counts: list[int]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    soft_cap: float = 0.0
    has_sinks: bool = False
    value_dim: int = 0  # values are the first numbers of the keys
    loose: int = 0  # tokens of no row at the end
    slack: int = 0  # how far the host's upper bounds lie above the truth
    seed: int = 0

    def __post_init__(self) -> None:
        random = torch.Generator(DEVICE).manual_seed(self.seed)
        self.scale = self.dim**-0.5
        per_row = [-(-length // self.page_size) for length in self.lengths]
        num_pages = sum(per_row) + 4
        order = (np.random.default_rng(self.seed).permutation(num_pages - 1) + 1).tolist()
        width = max([1, *per_row, -(-(max(self.lengths) + self.slack) // self.page_size)])
        # beyond a row's pages the table holds what must not be read
        table = torch.full((len(self.lengths), width), 2**40)
        shape = (num_pages, self.page_size, self.kv_heads, self.dim)
        self.cache = tuple(torch.full(shape, float("nan"), dtype=self.dtype, device=DEVICE) for _ in range(2))
        if self.value_dim:
            self.cache = self.cache[0], self.cache[0][..., : self.value_dim]
        rows, slots = [], []
        for row, (length, count) in enumerate(zip(self.lengths, self.counts, strict=True)):
            if length == 0:
                table[row] = 0
                slots += [0] * count
                rows.append(None)
                continue
            pages = torch.tensor([order.pop() for _ in range(per_row[row])])
            table[row, : len(pages)] = pages
            places = torch.arange(length)
            at = (pages[places // self.page_size], places % self.page_size)
            k, v = (self.draw(random, length, self.kv_heads, self.dim) for _ in range(2))
            v = k[..., : self.value_dim] if self.value_dim else v
            for held, new in zip(self.cache, (k, v), strict=True):
                held[at[0].to(DEVICE), at[1].to(DEVICE)] = new
            slots += (at[0] * self.page_size + at[1])[length - count :].tolist()
            rows.append((k, v))
        slots += [0] * self.loose
        self.rows = rows
        total = sum(self.counts) + self.loose
        # one projection gives all three: neither is contiguous
        fused = self.draw(random, total, self.heads + 2 * self.kv_heads, self.dim)
        self.starts = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int32)
        for row, pair in enumerate(rows):
            if pair is not None:
                begin, end = self.starts[row], self.starts[row + 1]
                fused[begin:end, self.heads : self.heads + self.kv_heads] = pair[0][-self.counts[row] :]
                fused[begin:end, self.heads + self.kv_heads :, : pair[1].shape[2]] = pair[1][-self.counts[row] :]
        self.sinks = 4 + 2 * self.draw(random, self.heads) if self.has_sinks else None
        self.query, self.key, self.value = fused.split([self.heads, self.kv_heads, self.kv_heads], 1)
        single = next((row for row, count in enumerate(self.counts) if count != 1), len(self.counts))
        self.batch = BatchView(
            ids=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            positions=torch.zeros(total, dtype=torch.int64, device=DEVICE),
            lengths=torch.tensor(self.lengths, device=DEVICE),
            slots=(torch.tensor(slots, device=DEVICE),),
            page_tables=(table.to(DEVICE),),
            num_tokens=np.array(self.counts, np.int32),
            max_lengths=np.array(self.lengths, np.int32) + self.slack,
            num_single=single,
            query_starts=torch.from_numpy(self.starts).to(DEVICE),
        )

    def draw(self, random: torch.Generator, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=DEVICE).to(self.dtype)

    def run(self) -> torch.Tensor:
        backend = TritonAttention(
            one_group(
                self.kv_heads,
                self.dim,
                num_heads=self.heads,
                page_size=self.page_size,
                dtype=self.dtype,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=self.has_sinks,
                value_dim=self.value_dim,
            ),
            self.dtype,
        )
        context = ForwardContext(self.batch, backend, backend.make_metadata(self.batch), [self.cache], (0,))
        return backend.forward(self.query, self.key, self.value, 0, self.scale, context, self.sinks)

    def expected(self) -> torch.Tensor:
        shape = (*self.query.shape[:2], self.value_dim or self.dim)
        out = torch.zeros(shape, dtype=torch.float64, device=DEVICE)
        for row, pair in enumerate(self.rows):
            if pair is not None:
                begin, end = int(self.starts[row]), int(self.starts[row + 1])
                out[begin:end] = attend(
                    self.query[begin:end], *pair, self.scale, self.window, self.soft_cap, self.sinks
                )
        return out

    def check(self) -> None:
        out, expected = self.run().double(), self.expected()
        assert torch.isfinite(out).all()
        assert (out - expected).norm() <= TOLERANCE[self.dtype] * expected.norm()
        # no token hides behind the others
        assert ((out - expected).abs().amax((1, 2)) <= 20 * TOLERANCE[self.dtype]).all()


def attend(query, key, value, scale, window=0, soft_cap=0.0, sinks=None) -> torch.Tensor:
    """The last tokens of one row over all its keys, in float64."""
    count, heads, _ = query.shape
    key, value = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    places = torch.arange(len(key), device=query.device)
    last = places[len(key) - count :, None]
    hidden = places > last
    if window:
        hidden |= places <= last - window
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, count, 1)], -1)
    weights = scores.softmax(-1)[..., : len(key)]
    return torch.einsum("hqk,khd->qhd", weights, value)


ODD = [1, 15, 16, 17, 63, 100, 257]


def singles(lengths: list[int], **kwargs) -> Case:
    return Case(lengths, [1] * len(lengths), **kwargs)


def row_alone(case: Case, row: int) -> torch.Tensor:
    """What a row gives when it is the whole batch, or alone among padding where rows are cut as in a larger batch."""
    num_rows = len(case.lengths)
    padding = [0] * max((limit for limit in (FEW_ROWS, MAX_ROW_PROGRAMS, SOME_ROWS) if num_rows > limit), default=0)
    shape = (case.heads, case.kv_heads, case.dim)
    alone = Case([case.lengths[row], *padding], [case.counts[row], *padding], *shape, dtype=case.dtype)
    alone.cache = case.cache
    mine = slice(int(case.starts[row]), int(case.starts[row + 1]))
    alone.query, alone.key, alone.value = (x[mine] for x in (case.query, case.key, case.value))
    alone.batch.slots[0][:] = case.batch.slots[0][mine]
    table = alone.batch.page_tables[0]
    table[0] = case.batch.page_tables[0][row, : table.shape[1]]
    return alone.run()


def drafted(case: Case, num_host: int = 0) -> Case:
    """The same tokens as a step with drafts: every position of a row is a row of one token. The tokens of the last
    `num_host` rows are from the host."""
    counts = torch.tensor(case.counts, device=DEVICE)
    offsets = torch.cat([torch.arange(count) for count in case.counts]).to(DEVICE)
    host_ids = -1 - offsets
    if num_host:
        host_ids[-num_host:] = 7
    lengths = (case.batch.lengths - counts).clamp(min=-1).repeat_interleave(counts) + offsets + 1
    case.batch = dataclasses.replace(
        case.batch,
        lengths=lengths,
        page_tables=(case.batch.page_tables[0].repeat_interleave(counts, 0),),
        num_tokens=np.ones(len(lengths), np.int32),
        max_lengths=lengths.cpu().numpy().astype(np.int32) + case.slack,
        num_single=len(lengths),
        query_starts=None,
        host_ids=host_ids,
        max_queries=max(case.counts),
    )
    return case


def check_drafted(case: Case, num_host: int = 0, bits: bool = False) -> None:
    """Against float64, and against the same rows computed one by one."""
    drafted(case, num_host).check()
    together = case.run()
    case.batch = dataclasses.replace(case.batch, max_queries=1)
    close = dict(rtol=0, atol=0) if bits else dict(rtol=0, atol=TOLERANCE[case.dtype])
    torch.testing.assert_close(together, case.run(), **close)
