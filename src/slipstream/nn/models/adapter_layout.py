"""AdapterLayout: where the matrices of a LoRA adapter lie in one flat buffer, and the layers that read them.

All adapters of an engine have the same layout: every product of every layer, the embedding and the projection to
tokens, with a common rank. So a slot for an adapter is one row of a matrix, and loading an adapter is one copy.
Matrices that an adapter does not have are zeros. A rank that has some outputs of a product has these rows of B and all
of A; one that has some inputs has these columns of A and all of B. Adapters of the embedding and of the projection to
tokens are whole on every rank, and are applied after their collectives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from slipstream.config.config import ModelConfig
from slipstream.nn.layers.adapted_rows import AdaptedRows
from slipstream.nn.layers.linear import Linear
from slipstream.nn.models.decoder import Decoder
from slipstream.nn.models.encoder import Encoder
from slipstream.nn.models.load import lay_out
from slipstream.nn.weight_format import StoredPart
from slipstream.ops.lora import LoraWeights
from slipstream.ops.lora.tiles import make_blocks, num_counters

EMBEDDING, HEAD = "embedding", "head"
_ALIGN = 64  # elements
_MIN_RANK = 16  # of the matrix units


def padded_rank(max_rank: int) -> int:
    """The rank of all matrices in memory: a power of two."""
    return max(_MIN_RANK, 1 << (max_rank - 1).bit_length())


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A product, the embedding or the projection to tokens."""

    path: str  # in the model
    a_shape: tuple[int, int]  # [matrices * rank, inputs]; of the embedding [tokens, rank]
    b_shape: tuple[int, int]  # [outputs, rank]
    rows: AdaptedRows | None  # None: one tensor, whose rows are in the checkpoint's order
    first: int  # element of A in the flat buffer
    columns: StoredPart | None = None  # of A, if the inputs are divided among ranks; None: all

    @property
    def first_b(self) -> int:
        return self.first + _aligned(self.a_shape[0] * self.a_shape[1])

    @property
    def end(self) -> int:
        return self.first_b + _aligned(self.b_shape[0] * self.b_shape[1])

    def a_of(self, flat: torch.Tensor) -> torch.Tensor:
        """View of flat [..., elements] as [..., *a_shape]."""
        return _view(flat, self.first, self.a_shape)

    def b_of(self, flat: torch.Tensor) -> torch.Tensor:
        return _view(flat, self.first_b, self.b_shape)

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        return ((0, self.b_shape[0], 0),) if self.rows is None else self.rows.runs


class AdapterLayout:
    def __init__(self, model: Decoder | Encoder, max_rank: int, *, generates: bool) -> None:
        """`max_rank`: of all adapters. `generates`: the projection to tokens is used, and can have an adapter."""
        self.max_rank = max_rank
        self.padded_rank = padded_rank(max_rank)
        self.layers: dict[str, AdaptedLayer] = {}
        self.num_elements = 0
        self._model = model
        vocab_size, hidden_size = model.shape.vocab_size, model.shape.hidden_size
        self._add(EMBEDDING, (vocab_size, self.padded_rank), hidden_size, None)
        if generates:
            self._add(HEAD, (self.padded_rank, hidden_size), vocab_size, None)
        for path, linear in self._linears():
            rows = AdaptedRows(linear)
            a_shape = (len(rows.index) * self.padded_rank, linear.num_inputs)
            self._add(path, a_shape, linear.num_outputs, rows, linear.input_part)

    def _linears(self) -> Iterator[tuple[str, Linear]]:
        """Products of the layers. Those outside, of pooling heads for example, have no adapters."""
        for path, module in self._model.layers.named_modules(prefix="layers"):
            if isinstance(module, Linear):
                yield path, module

    def _add(
        self,
        path: str,
        a_shape: tuple[int, int],
        num_outputs: int,
        rows: AdaptedRows | None,
        columns: StoredPart | None = None,
    ) -> None:
        layer = AdaptedLayer(path, a_shape, (num_outputs, self.padded_rank), rows, self.num_elements, columns)
        self.layers[path] = layer
        self.num_elements = layer.end

    @cached_property
    def widest(self) -> int:
        """Maximum number of outputs of all matrices A of one product."""
        return max(layer.a_shape[0] for path, layer in self.layers.items() if path != EMBEDDING)

    def attach(self, slots: torch.Tensor) -> None:
        """Let the layers of the model read adapters from slots [number of slots, elements], on the model's device."""
        linears = dict(self._linears())
        for path, layer in self.layers.items():
            blocks = torch.from_numpy(make_blocks(layer.runs)).to(slots.device)
            arrived = torch.zeros(num_counters(layer.a_shape[0], len(slots)), dtype=torch.int32, device=slots.device)
            weights = LoraWeights(layer.a_of(slots), layer.b_of(slots), layer.runs, blocks, arrived)
            if path == EMBEDDING:
                self._model.embedding.lora = weights
            elif path == HEAD:
                assert isinstance(self._model, Decoder), "encoders do not generate"
                self._model.head_lora = weights
            else:
                linears[path].lora = weights


def measure_adapter(config: ModelConfig, max_rank: int, device_kind: str) -> tuple[int, int]:
    """Elements of one adapter, and `widest`, from the model's layout: nothing is allocated."""
    layout = AdapterLayout(lay_out(config, torch.device(device_kind)), max_rank, generates=config.generates)
    return layout.num_elements, layout.widest


def _aligned(count: int) -> int:
    return -(-count // _ALIGN) * _ALIGN


def _view(flat: torch.Tensor, first: int, shape: tuple[int, int]) -> torch.Tensor:
    return flat.narrow(-1, first, shape[0] * shape[1]).unflatten(-1, shape)
