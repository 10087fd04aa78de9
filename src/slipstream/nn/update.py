"""ModelWeights: replaces the weights of a model in place, so that captured graphs and kernels keep their addresses.

Sources: files, tensors of this process by their names in a checkpoint, or a torch.distributed group whose first rank
sends such tensors (`received_weights`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from slipstream.base.errors import BadCheckpoint, InvalidParams, UnsupportedModel
from slipstream.checkpoint.locate import require_weights
from slipstream.config.config import ModelConfig
from slipstream.device.device import Device
from slipstream.nn.decoder import Decoder
from slipstream.nn.encoder import Encoder
from slipstream.nn.load import find_tensors, stored_rules, wrap_source
from slipstream.nn.weights.load import fill_targets, find_targets
from slipstream.nn.weights.source import SourceTensor
from slipstream.nn.weights.weight_format import Weight, WeightTarget

_INTEGERS = {str(dtype) for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)}


class ModelWeights:
    """Implements `WeightUpdate`."""

    def __init__(self, config: ModelConfig, model: Decoder | Encoder, device: Device) -> None:
        self._config = config
        self._model = model
        self._device = device
        self._missing: set[str] = set()  # targets that were dropped, or changed by an update that failed

    @property
    def num_missing(self) -> int:
        return len(self._missing)

    def check_can_update(self) -> None:
        """Raises UnsupportedModel if the model cannot take other weights."""
        if self._config.info.backend_folder:
            raise UnsupportedModel(
                "the weights of a transformers module cannot be exchanged; use an architecture that runs without it"
            )
        if self._config.offload_bytes:
            raise UnsupportedModel("weights in host memory cannot be exchanged in place; remove cpu_offload_gb")
        packed = [name for name, part in self._model.named_modules() if isinstance(part, Weight) and not part.refills]
        if packed:
            raise UnsupportedModel(
                f"{packed[0]} and others are packed when they are read, so that they cannot be exchanged in place; use "
                "a checkpoint that is not quantised, or dequantize"
            )

    def drop(self) -> None:
        """All weights have lost their content."""
        self._missing = set(find_targets(self._model))

    def update(self, source: object) -> None:
        """Reads weights from a folder or file of the same architecture (None: those of the model), or from tensors of a
        checkpoint by name, which may be a part of them.

        Names and shapes of a folder and of a mapping are checked before the first weight changes; an iterator is read
        tensor by tensor. If reading fails later, the tensors that changed count as missing until they are loaded again.
        """
        targets = find_targets(self._model)
        if source is None or isinstance(source, str | Path):
            config = self._own_files() if source is None else self._of_folder(Path(source))
            found, _ = find_tensors(config, self._model, targets, self._device.torch_device)
            self._missing = set(targets)
            self._device.run_and_wait(lambda: fill_targets(found, targets))
            self._missing.clear()
            return
        self._check_plain()
        if isinstance(source, Mapping):
            matched = list(self._matched(source.items(), targets))
            self._device.run_and_wait(lambda: self._fill(matched, targets))
        elif isinstance(source, Iterable) and not isinstance(source, bytes):
            self._device.run_and_wait(lambda: self._fill(self._matched(source, targets), targets))
        else:
            raise InvalidParams(
                f"weights are {type(source).__name__}; give a folder, or tensors by name", param="weights"
            )

    def _check_plain(self) -> None:
        """Raises UnsupportedModel for a quantised checkpoint, several tensors of which are one weight: some of them, or
        floats under the name of its numbers, would not replace it."""
        stored = self._config.quantization
        if stored is not None and stored.layout != "online" and self._config.load_format != "dummy":
            raise UnsupportedModel(
                f"tensors by name cannot replace weights, because the checkpoint is quantised by {stored.method}; give "
                "a folder, or run the unquantised checkpoint"
            )

    def _own_files(self) -> ModelConfig:
        """Dummy weights are replaced by those of the model's folder, where it has some."""
        folder = Path(self._config.path)
        if self._config.load_format == "dummy" and any(folder.glob("*.safetensors")):
            return self._of_folder(folder)
        return self._config

    def _of_folder(self, folder: Path) -> ModelConfig:
        if self._config.load_format == "gguf":
            return msgspec.structs.replace(self._config, path=str(folder))
        require_weights(folder)
        return msgspec.structs.replace(self._config, path=str(folder), load_format="safetensors")

    def _fill(self, matched: Iterable[tuple[str, SourceTensor]], targets: Mapping[str, WeightTarget]) -> None:
        changed: set[str] = set()
        try:
            for name, tensor in matched:
                changed.add(name)
                fill_targets({name: tensor}, targets)
                self._missing.discard(name)
        except BaseException:
            self._missing |= changed
            raise

    def _matched(
        self, tensors: Iterable[tuple[str, torch.Tensor]], targets: Mapping[str, WeightTarget]
    ) -> Iterator[tuple[str, SourceTensor]]:
        """Targets and their tensors. Tensors that the model does not read are left out, as in a checkpoint."""
        rules = stored_rules(self._config, self._model.shape)
        for tensor in wrap_source(_TensorSource(tensors), self._model):
            try:
                name = rules.rename(tensor.name)
            except KeyError:
                raise BadCheckpoint(
                    f"the model has no tensor {tensor.name:.200}; give names of its checkpoint"
                ) from None
            if name is None:
                continue
            if name not in targets or tensor.shape != targets[name].shape:
                what = "unknown" if name not in targets else f"{list(targets[name].shape)}"
                raise BadCheckpoint(f"{tensor.name:.200} is {list(tensor.shape)}, and its place in the model is {what}")
            if tensor.kind in _INTEGERS:
                raise BadCheckpoint(f"{tensor.name:.200} is {tensor.kind}; give a floating-point type")
            yield name, tensor


class _TensorSource:
    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors

    def __iter__(self) -> Iterator[SourceTensor]:
        for name, tensor in self._tensors:
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise InvalidParams("weights must be pairs of a name and a torch tensor", param="weights")
            yield SourceTensor(name, tuple(tensor.shape), str(tensor.dtype), tensor.detach)


def received_weights(
    group: Any, names: Sequence[str], shapes: Sequence[Sequence[int]], dtypes: Sequence[torch.dtype], *, source: int = 0
) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that rank `source` of a torch.distributed process group broadcasts one by one, in this order, on the
    device of the group: a CUDA tensor for NCCL, else a CPU tensor."""
    options = torch.distributed.BroadcastOptions()
    options.rootRank = source
    device = "cuda" if "nccl" in group.name().lower() else "cpu"
    for name, shape, dtype in zip(names, shapes, dtypes, strict=True):
        tensor = torch.empty(tuple(shape), dtype=dtype, device=device)
        group.broadcast([tensor], options).wait()
        yield name, tensor
