"""The package `vllm` for vLLM's own tests and examples: each public name is Slipstream's.

A script of a user would have its imports changed; here an import hook gives `vllm.*` instead, so that the files of the
sdist run unchanged. Names that Slipstream does not have are placeholders: they can be imported, subclassed and written
in annotations, and fail where they are used, so that a case fails only if it needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import logging
import socket
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

MOVED = {
    "BatchUpdate": "slipstream.params.processors",
    "Counter": "slipstream.metrics.prometheus",
    "Gauge": "slipstream.metrics.prometheus",
    "Histogram": "slipstream.metrics.prometheus",
    "Metric": "slipstream.metrics.prometheus",
    "RequestLogitsProcessor": "slipstream.params.processors",
    "StructuredOutputsConfig": "slipstream.front.param_checks",
    "Vector": "slipstream.metrics.prometheus",
    "process_dict_updates": "slipstream.params.processors",
}
"""Names that are not in `slipstream` itself, with their modules."""
ERRORS = {"VLLMValidationError": "UserError", "EngineDeadError": "EngineDead"}
"""Names of exceptions here."""


class Absent(type):
    """Classes of vLLM that are not here."""

    def __call__(cls, *given: Any, **named: Any) -> Any:
        raise NotImplementedError(f"{cls.__qualname__} of vLLM is not here")

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__qualname__}.{name}")

    def __getitem__(cls, key: Any) -> Any:
        return cls

    def __iter__(cls) -> Iterator[Any]:
        raise NotImplementedError(f"{cls.__qualname__} of vLLM is not here")


def absent(name: str) -> type:
    return Absent(name, (), {"__class_getitem__": classmethod(lambda cls, key: cls)})


class Platform:
    """One device. Tests for a large CUDA device run too."""

    device_type = "cpu"
    device_name = "cpu"
    simple_compile_backend = "eager"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *given, **named: name in ("is_cuda", "is_cuda_alike")

    def get_device_total_memory(self, *given: Any) -> int:
        return 80 << 30

    def device_count(self) -> int:
        return 1

    def fp8_dtype(self) -> Any:
        import torch

        return torch.float8_e4m3fn

    def get_device_capability(self, *given: Any) -> tuple[int, int]:
        return 9, 0


class Asset:
    """A picture, sound or film. Cases with one are not counted: models read text only."""

    def __init__(self, name: str, *given: Any, **named: Any) -> None:
        self.name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


def collect_garbage(*given: Any, **named: Any) -> None:
    gc.collect()


@contextlib.contextmanager
def torch_threads(count: int | None = None, *given: Any, **named: Any) -> Iterator[None]:
    yield


def set_random_seed(seed: int) -> None:
    import random

    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def checked_dtype(model: str, config: Any, dtype: Any = "auto", **named: Any) -> Any:
    """The dtype in which transformers loads a model for comparison: that of the model here."""
    import torch

    names = {"half": torch.float16, "float": torch.float32}
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.float32  # the dtype of every tiny model
    return names.get(dtype) or getattr(torch, dtype)


def is_list_of(value: Any, typ: Any, *, check: str = "first") -> bool:
    return isinstance(value, list) and all(isinstance(each, typ) for each in value)


def same(value: Any, *given: Any, **named: Any) -> Any:
    return value


def compute_maxsim_score(query: Any, document: Any) -> Any:
    return (query.float() @ document.float().T).amax(-1).sum()


def print_embeddings(values: Any, *given: Any, **named: Any) -> None:
    sys.stdout.write(f"{len(values)} values: {values}\n")


def get_open_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class Parser(argparse.ArgumentParser):
    """Flags with underscores are those with dashes."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        plain = [_dashed(each) if each.startswith("--") else each for each in given]
        return super().parse_known_args(plain, namespace)


def _dashed(flag: str) -> str:
    name, equals, value = flag.partition("=")
    return name.replace("_", "-") + equals + value


HELPERS: dict[str, dict[str, Any]] = {
    "tblib.pickling_support": {"install": collect_garbage},
    "vllm.assets.audio": {"AudioAsset": Asset},
    "vllm.assets.image": {"ImageAsset": Asset},
    "vllm.assets.video": {"VideoAsset": Asset},
    "vllm.config.model": {
        "LogprobsMode": Literal["raw_logits", "raw_logprobs", "processed_logits", "processed_logprobs"],
        "_get_and_verify_dtype": checked_dtype,
    },
    "vllm.connections": {"global_http_connection": SimpleNamespace()},
    "vllm.distributed": {"cleanup_dist_env_and_memory": collect_garbage},
    "vllm.entrypoints.pooling.scoring.utils": {"compute_maxsim_score": compute_maxsim_score},
    "vllm.logger": {"init_logger": logging.getLogger},
    "vllm.platforms": {"current_platform": Platform()},
    "vllm.transformers_utils.utils": {"maybe_model_redirect": same},
    "vllm.utils.argparse_utils": {"FlexibleArgumentParser": Parser},
    "vllm.utils.collection_utils": {"is_list_of": is_list_of},
    "vllm.utils.mem_constants": {"GB_bytes": 10**9},
    "vllm.utils.network_utils": {"get_open_port": get_open_port},
    "vllm.utils.print_utils": {"print_embeddings": print_embeddings},
    "vllm.utils.torch_utils": {
        "set_default_torch_num_threads": torch_threads,
        "set_random_seed": set_random_seed,
    },
}
"""What vLLM's tests use of its utilities, by module."""


class StandIn(ModuleType):
    """A module `vllm` or `vllm.…`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = self._look_up(name)
        setattr(self, name, value)
        return value

    def _look_up(self, name: str) -> Any:
        helper = HELPERS.get(self.__name__, {})
        if name in helper:
            return helper[name]
        if self.__name__.split(".")[0] != "vllm":
            module = f"{self.__name__}.{name}"
            return importlib.import_module(module) if module in HELPERS else absent(module)
        import slipstream
        from slipstream.base import errors

        if name in slipstream.__all__:
            return getattr(slipstream, name)
        if name in MOVED:
            module = importlib.import_module(MOVED[name])
            return getattr(module, name, None) or absent(f"{self.__name__}.{name}")
        if name in ERRORS:
            return getattr(errors, ERRORS[name])
        if self.__name__ == "vllm.v1.sample.logits_processor" and name == "LOGITSPROCS_GROUP":
            from slipstream.scheduler import request_processors

            return request_processors.ENTRY_POINTS
        if self.__name__ == "vllm.envs" or name == "envs":
            return SimpleNamespace() if name == "envs" else None
        return absent(f"{self.__name__}.{name}")


OF_SERVERS = ("PIL", "anthropic", "openai", "pybase64", "ray", "tblib", "zmq")
"""Packages that vLLM's test helpers import for its server and for images: placeholders where they are not installed."""


class Finder:
    """Finds modules below some packages."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] not in self.packages:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder("vllm"))
        sys.meta_path.append(Finder(*OF_SERVERS))  # after those that find what is installed
