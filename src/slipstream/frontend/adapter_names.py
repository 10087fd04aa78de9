"""AdapterNames: LoRA adapters that requests name as their model, those of the start and those loaded since."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from slipstream.base.errors import InvalidAdapter, ModelNotFound
from slipstream.checkpoint.locate import check_adapter_folder
from slipstream.frontend.served import ServedModel
from slipstream.params.lora import LoRARequest


class AdapterNames:
    """The adapters of one front end. Each is a `ServedModel` with the name of the adapter."""

    def __init__(self) -> None:
        self._served: dict[str, ServedModel] = {}
        self._known: set[str] = set()  # models whose adapters of the start are listed
        self._next_number = 1

    def of(self, models: Mapping[str, ServedModel]) -> dict[str, ServedModel]:
        """All adapters by name. `models`: the base models that are loaded."""
        for name, served in models.items():
            if name not in self._known:
                self._known.add(name)
                for lora in served.description.adapters:
                    self._add(lora.lora_name, lora.lora_path, served)
        return self._served

    def load(
        self, models: Mapping[str, ServedModel], name: str, path: str, *, base: str | None = None, replace: bool = False
    ) -> None:
        """Adds an adapter. Its settings are checked now, with the rank; its matrices when a request first uses it."""
        if name in models or (name in self.of(models) and not replace):
            raise InvalidAdapter(
                f"there is a model {name} already; unload it or choose another name", param="lora_name"
            )
        takers = {model: served for model, served in models.items() if served.description.takes_adapters}
        if base is not None and base not in takers:
            raise ModelNotFound(f"{base} takes no adapters; {', '.join(takers) or 'no model here'} does")
        if not takers:
            raise InvalidAdapter("no model here takes adapters; start the server with --enable-lora")
        if base is None and len(takers) > 1:
            fact = f"{', '.join(takers)} take adapters"
            raise InvalidAdapter(f"{fact}; name one as base_model_name", param="base_model_name")
        served = next(iter(takers.values())) if base is None else takers[base]
        LoRARequest(name, 1, path)  # raises for wrong texts
        try:
            check_adapter_folder(Path(path), served.description.max_lora_rank)
        except InvalidAdapter as error:
            error.param = "lora_path"
            raise
        self._add(name, path, served)

    def unload(self, models: Mapping[str, ServedModel], name: str) -> None:
        """Requests of this adapter that were sent continue."""
        if name not in self.of(models):
            raise ModelNotFound(f"there is no adapter {name!r}; there is {', '.join(self._served) or 'none'}")
        del self._served[name]

    def _add(self, name: str, path: str, served: ServedModel) -> None:
        # numbers are never used twice, so the engine reads a folder again that is loaded again
        self._served[name] = served.with_adapter(LoRARequest(name, self._next_number, path))
        self._next_number += 1
