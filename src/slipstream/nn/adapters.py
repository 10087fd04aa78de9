"""Reads the tensors of a PEFT LoRA folder into a flat buffer of an AdapterLayout."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch

from slipstream.base.errors import BadCheckpoint, InvalidAdapter
from slipstream.checkpoint.locate import WEIGHTS, AdapterSettings, read_adapter_settings
from slipstream.config.config import ModelConfig
from slipstream.device.sync_check import sync_allowed
from slipstream.nn.decoder import Decoder
from slipstream.nn.encoder import Encoder
from slipstream.nn.layers.linear import Linear
from slipstream.nn.load import lay_out
from slipstream.nn.weights.load import few
from slipstream.nn.weights.source import Rules, SourceTensor, open_file
from slipstream.nn.weights.stored_part import sharded_targets, sliced
from slipstream.nn.weights.weight_format import CheckpointTensor, StoredPart, WeightTarget
from slipstream.ops.gemm.lora import LoraWeights
from slipstream.ops.gemm.lora.reference import make_blocks, num_counters

_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<matrix>[AB])(\.default)?\.weight")
_BASE = re.compile(r"(?P<module>.+)\.base_layer\.weight")
"""Weights of the base model, which PEFT saves beside an adapter of the embedding or of the projection to tokens."""
_EMBEDDED = re.compile(r"(?P<module>.+)\.lora_embedding_(?P<matrix>[AB])(\.default)?")


@dataclass(slots=True)
class _Pair:
    """The matrices of one module of the base model."""

    module: str
    layer: AdaptedLayer
    part: str  # the checkpoint's tensor among those of a product
    is_embedding: bool
    a: SourceTensor | None = None  # [rank, inputs]; of an embedding [rank, tokens]
    b: SourceTensor | None = None  # [outputs, rank]


def read_adapter(folder: Path, layout: AdapterLayout, rules: Rules, buffer: torch.Tensor) -> bool:
    """Fills buffer [elements], which the caller may reuse. Returns whether the adapter changes the projection to
    tokens. Raises InvalidAdapter, which names the fact and the limit."""
    settings = read_adapter_settings(folder)
    try:
        source = open_file(folder / WEIGHTS[0].removesuffix(".safetensors"))
        if source is None:
            raise InvalidAdapter(f"{folder} has neither {WEIGHTS[0]} nor {WEIGHTS[1]}; download the rest of it")
        pairs = _match(folder, list(source), layout, rules)
        buffer.zero_()
        for pair in pairs:
            _fill(folder, pair, settings, layout, buffer)
    except BadCheckpoint as error:
        raise InvalidAdapter(str(error)) from None
    return any(pair.layer.path == HEAD for pair in pairs)


def _match(folder: Path, tensors: list[SourceTensor], layout: AdapterLayout, rules: Rules) -> list[_Pair]:
    pairs: dict[str, _Pair] = {}
    unknown: list[str] = []
    for tensor in tensors:
        name = tensor.name.removeprefix(_PREFIX)
        if base := _BASE.fullmatch(name):
            _check_base(folder, tensor, base["module"], layout, rules)
            continue
        embedded = _EMBEDDED.fullmatch(name)
        found = embedded or _NAME.fullmatch(name)
        if found is None:
            if "lora_magnitude_vector" in name:
                raise InvalidAdapter(f"{folder}: DoRA is not supported ({tensor.name}); merge the adapter")
            raise InvalidAdapter(
                f"{folder}: {tensor.name} is not a LoRA matrix of a module; fully trained modules and biases are not "
                "supported, merge the adapter"
            )
        module = found["module"]
        if module not in pairs:
            found_layer = _find_layer(module, layout, rules, is_embedding=embedded is not None)
            if found_layer is None:
                unknown.append(module)
                continue
            pairs[module] = _Pair(module, *found_layer, is_embedding=embedded is not None)
        setattr(pairs[module], found["matrix"].lower(), tensor)
    if unknown:
        raise InvalidAdapter(
            f"{folder}: {len(set(unknown))} modules have adapters and cannot have any in this model "
            f"({few(sorted(set(unknown)))}); adapters change linear layers, the embedding and, of a model that "
            "generates, lm_head"
        )
    if not pairs:
        raise InvalidAdapter(f"{folder} has no LoRA matrices; download it again")
    for pair in pairs.values():
        _check(folder, pair, layout)
    return list(pairs.values())


def _check_base(folder: Path, tensor: SourceTensor, module: str, layout: AdapterLayout, rules: Rules) -> None:
    """Raises for weights that this model cannot have: those of a vocabulary that was resized, or of another layer."""
    head, embedding = (_find_layer(module, layout, rules, is_embedding=each) for each in (False, True))
    if head is not None and head[0].path == HEAD:
        own = (head[0].b_shape[0], head[0].a_shape[1])
    elif embedding is not None:
        own = (embedding[0].a_shape[0], embedding[0].b_shape[0])
    else:
        raise InvalidAdapter(f"{folder}: {tensor.name} is a weight of the base model; merge the adapter")
    if tensor.shape != own:
        raise InvalidAdapter(
            f"{folder}: {tensor.name} is {list(tensor.shape)}, and this model has {list(own)}; the vocabulary was "
            "resized for the adapter, merge it"
        )


def _find_layer(
    module: str, layout: AdapterLayout, rules: Rules, *, is_embedding: bool
) -> tuple[AdaptedLayer, str] | None:
    """The layer of a module of the base model, and the tensor of it; None if there is none."""
    if module.rpartition(".")[2] == "lm_head":
        return (layout.layers[HEAD], "") if HEAD in layout.layers and not is_embedding else None
    try:
        ours = rules.rename(f"{module}.weight")
    except KeyError:
        return None
    path = (ours or "").removesuffix(".weight")
    if is_embedding or path == EMBEDDING:
        return (layout.layers[EMBEDDING], "") if is_embedding and path == EMBEDDING else None
    for own, part in ((path, ""), path.rpartition(".")[::2]):
        layer = layout.layers.get(own)
        if layer is not None and layer.rows is not None and part in layer.rows.index:
            return layer, part
    return None


def _check(folder: Path, pair: _Pair, layout: AdapterLayout) -> None:
    a, b, layer = pair.a, pair.b, pair.layer
    if a is None or b is None:
        missing = "A" if a is None else "B"
        raise InvalidAdapter(f"{folder}: {pair.module} has no matrix {missing}; download the adapter again")
    num_outputs = layer.b_shape[0] if layer.rows is None else layer.rows.num_rows[pair.part]
    num_inputs = layer.a_shape[0] if pair.is_embedding else layer.a_shape[1]
    if layer.columns is not None:
        num_inputs = layer.columns.total
    rank = a.shape[0] if a.shape else 0
    if a.shape != (rank, num_inputs) or b.shape != (num_outputs, rank):
        raise InvalidAdapter(
            f"{folder}: the matrices of {pair.module} are {list(a.shape)} and {list(b.shape)}, and this model needs "
            f"[rank, {num_inputs}] and [{num_outputs}, rank]; the adapter is for another model"
        )
    if not 0 < rank <= layout.max_rank:
        raise InvalidAdapter(
            f"{folder}: {pair.module} has rank {rank}, and the engine takes up to {layout.max_rank}; raise "
            "max_lora_rank"
        )


def _fill(folder: Path, pair: _Pair, settings: AdapterSettings, layout: AdapterLayout, buffer: torch.Tensor) -> None:
    assert pair.a is not None and pair.b is not None
    layer, rank = pair.layer, pair.a.shape[0]
    a = _read_floats(folder, pair.a).to(buffer.dtype)
    wide = _read_floats(folder, pair.b).to(torch.promote_types(buffer.dtype, torch.float32))
    b = wide * settings.scale(pair.module, rank)
    b = b.to(buffer.dtype)
    with sync_allowed("the adapter lies in host memory"):
        is_finite = bool(torch.isfinite(a).all()) and bool(torch.isfinite(b).all())
    if not is_finite:
        raise InvalidAdapter(
            f"{folder}: the matrices of {pair.module} have values that are not finite in {buffer.dtype}; use another "
            "dtype, or another adapter"
        )
    own_a, own_b = layer.a_of(buffer), layer.b_of(buffer)
    if pair.is_embedding:
        own_a[:, :rank] = a.T
        own_b[:, :rank] = b
    elif layer.rows is None:
        own_a[:rank] = a
        own_b[:, :rank] = b
    else:
        first = layer.rows.index[pair.part] * layout.padded_rank
        own_a[first : first + rank] = a if layer.columns is None else sliced(a, 1, layer.columns)
        layer.rows.fill(own_b[:, :rank], pair.part, b)


def _read_floats(folder: Path, tensor: SourceTensor) -> torch.Tensor:
    values = tensor.read()
    if not values.is_floating_point():
        raise InvalidAdapter(
            f"{folder}: {tensor.name} has numbers of type {tensor.kind}, and a LoRA matrix has floating-point ones; "
            "convert the adapter"
        )
    return values


# AdapterLayout: where the matrices of a LoRA adapter lie in one flat buffer, and the layers that read them.
#
# All adapters of an engine have the same layout: every product of every layer, the embedding and the projection to
# tokens, with a common rank. So a slot for an adapter is one row of a matrix, and loading an adapter is one copy.
# Matrices that an adapter does not have are zeros. A rank that has some outputs of a product has these rows of B and
# all of A; one that has some inputs has these columns of A and all of B. Adapters of the embedding and of the
# projection to tokens are whole on every rank, and are applied after their collectives.

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


# AdaptedRows: how the rows of adapter matrices B follow the rows of a product's weight.
#
# A product may store its outputs in another order than the checkpoint, or join tensors of the checkpoint. Its
# `weight_targets` place the rows of each tensor; here the same targets place the rows of B. A rank that has some rows
# of the product has the same rows of B.


class AdaptedRows:
    """The checkpoint's tensors that one GEMM is made of, each with an adapter of its own."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        targets = dict(_targets(linear, torch.empty(linear.num_outputs, 1, dtype=torch.float32)))
        # by tensor: "q", or "" for a single one; of all ranks
        self.num_rows = {name: own.shape[0] for name, own in targets.items()}
        self.index = {name: index for index, name in enumerate(targets)}
        self.runs = self._runs()

    def _runs(self) -> tuple[tuple[int, int, int], ...]:
        """(first output, end, index of the tensor) of adjacent outputs of one tensor."""
        owner = torch.empty(self._linear.num_outputs, 1, dtype=torch.float32)
        for name, own in _targets(self._linear, owner):
            own.fill(Piece(torch.full((self.num_rows[name], 1), float(self.index[name]), dtype=torch.float32)))
        with sync_allowed("at start, in host memory"):
            indices = [int(value) for value in owner.flatten().tolist()]
        borders = [at for at in range(1, len(indices)) if indices[at] != indices[at - 1]]
        return tuple(
            (first, end, indices[first]) for first, end in zip([0, *borders], [*borders, len(indices)], strict=True)
        )

    def fill(self, target: torch.Tensor, name: str, rows: torch.Tensor) -> None:
        """Write rows [rows of the tensor, rank] to their positions in target [outputs, rank], on the host."""
        dict(_targets(self._linear, target))[name].fill(Piece(rows))


class Piece:
    """A tensor in memory as a `CheckpointTensor`."""

    blocks = None
    kind = "F32"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self._tensor = tuple(tensor.shape), tensor

    def read(self) -> torch.Tensor:
        return self._tensor

    def write_to(self, target: torch.Tensor) -> None:
        target.copy_(self._tensor)


class _Rows:
    """In place of a product's weight: rows of another matrix with as many rows."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target

    def targets_in(self, part: str, first_row: int, num_rows: int) -> Iterator[tuple[str, WeightTarget]]:
        yield "weight", WeightTarget((num_rows, self._target.shape[1]), partial(self._fill, first_row))

    def _fill(self, first_row: int, piece: CheckpointTensor) -> None:
        piece.write_to(self._target[first_row : first_row + piece.shape[0]])


def _targets(linear: Linear, target: torch.Tensor) -> Iterator[tuple[str, WeightTarget]]:
    """The targets of a copy of the product whose weight is `target`, by the name of the tensor."""
    shadow = copy.copy(linear)
    shadow.__dict__["_modules"] = {}
    shadow.__dict__["_parameters"] = {}
    shadow.__dict__["weight"] = _Rows(target)
    shadow.__dict__["bias"] = None
    # rows of the whole product, also if the inputs are divided among ranks
    targets = Linear.weight_targets(shadow) if linear.input_part is not None else shadow.weight_targets()
    for name, own in sharded_targets(dict(targets), linear.stored_parts).items():
        yield name.removesuffix("weight").removesuffix("."), own
