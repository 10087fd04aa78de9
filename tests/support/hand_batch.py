"""A hand-made batch: rows, pages and a BatchView without a runner; memory that was not written holds garbage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hand_steps import StepRow, hand_steps
from slipstream.contracts.cache_spec import CacheSpec
from slipstream.nn.context import BatchView, ForwardContext
from slipstream.nn.decoder import Decoder
from slipstream.nn.sdpa import SdpaAttention
from slipstream.ops.recurrent import RecurrentSteps
from slipstream.scheduler.cache.pages import group_sites

GARBAGE = float("nan")
NUM_SLOTS = 9  # of recurrent states


@dataclass
class HandRow:
    pages: list[int]
    length: int = 0


@dataclass
class HandRunner:
    """Runs chunks of rows through a model; the pages of a row are in random order."""

    model: Decoder
    dtype: torch.dtype = torch.float32
    page_size: int = 4
    num_pages: int = 64
    device: str = "cpu"
    slack: int = 0  # how much the host's upper bounds exceed the true lengths
    rows: dict[str, HandRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        specs = self.model.shape.cache_specs(self.page_size, str(self.dtype).removeprefix("torch."))
        self.caches = [self.new_cache(spec) for spec in specs]
        self.groups = group_sites(specs)
        self.group_of_site = tuple(
            next(number for number, group in enumerate(self.groups) if site in group.sites)
            for site in range(len(specs))
        )
        self.attention = SdpaAttention(self.groups, self.dtype)
        self.states = [
            {
                field.name: torch.full(
                    (NUM_SLOTS, *field.shape), GARBAGE, dtype=getattr(torch, field.dtype), device=self.device
                )
                for field in spec.fields
            }
            for spec in self.model.shape.state_specs(str(self.dtype).removeprefix("torch."))
        ]
        self.steps: RecurrentSteps | None = None  # of the last batch, if the model has recurrent states
        # page 0 is the null page; the others are used in random order
        self.free = (np.random.default_rng(0).permutation(self.num_pages - 1) + 1).tolist()

    def new_cache(self, spec: CacheSpec) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (self.num_pages, self.page_size, spec.num_kv_heads, spec.head_dim)
        keys, values = (torch.full(shape, GARBAGE, dtype=self.dtype, device=self.device) for _ in range(2))
        return keys, keys[..., : spec.value_dim] if spec.value_dim else values

    def batch(self, chunks: dict[str, list[int]]) -> BatchView:
        """The next tokens of some rows; rows with one token must come first."""
        counts = [len(ids) for ids in chunks.values()]
        num_single = next((i for i, count in enumerate(counts) if count > 1), len(counts))
        ids, positions, slots, lengths = [], [], [], []
        for name, tokens in chunks.items():
            row = self.rows.setdefault(name, HandRow([]))
            for token in tokens:
                if row.length == len(row.pages) * self.page_size:
                    row.pages.append(self.free.pop())
                ids.append(token)
                positions.append(row.length)
                slots.append(row.pages[row.length // self.page_size] * self.page_size + row.length % self.page_size)
                row.length += 1
            lengths.append(row.length)
        if self.states:
            slots_of = {name: slot for slot, name in enumerate(self.rows, 1)}
            steps = [
                StepRow(slots_of[name], length - len(tokens), len(tokens))
                for (name, tokens), length in zip(chunks.items(), lengths, strict=True)
            ]
            self.steps = hand_steps(steps, device=self.device)
        max_lengths = np.array(lengths, np.int32) + self.slack
        width = -(-int(max_lengths.max()) // self.page_size)
        tables = []
        for group in self.groups:  # groups share page numbers, since every site has its own tensors
            table = np.zeros((len(chunks), width), np.int64)
            for place, (name, tokens) in enumerate(chunks.items()):
                row = self.rows[name]
                seen_from = row.length - len(tokens) - group.window + 1 if group.window else 0
                dropped = max(seen_from, 0) // self.page_size  # no longer visible
                table[place, dropped : len(row.pages)] = row.pages[dropped:]
            tables.append(torch.from_numpy(table).to(self.device))
        return BatchView(
            ids=torch.tensor(ids, device=self.device),
            positions=torch.tensor(positions, device=self.device),
            lengths=torch.tensor(lengths, device=self.device),
            slots=(torch.tensor(slots, device=self.device),) * len(tables),
            page_tables=tuple(tables),
            num_tokens=np.array(counts, np.int32),
            max_lengths=max_lengths,
            num_single=num_single,
            query_starts=torch.tensor(np.cumsum([0, *counts]), dtype=torch.int32, device=self.device),
        )

    def context(self, batch: BatchView, only_last: bool = False) -> ForwardContext:
        metadata = self.attention.make_metadata(batch)
        context = ForwardContext(batch, self.attention, metadata, self.caches, self.group_of_site, only_last)
        return replace(context, recurrent=self.steps, states=self.states)

    def run(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Logits of every token, by row."""
        context = self.context(self.batch(chunks))
        logits = self.model.logits(self.model(context))
        return dict(zip(chunks, logits.split([len(ids) for ids in chunks.values()]), strict=True))

    def run_last(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Logits of the last token of every row only."""
        logits = self.model.logits(self.model(self.context(self.batch(chunks), only_last=True)))
        return dict(zip(chunks, logits, strict=True))
