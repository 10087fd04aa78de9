"""A damaged file of a model is loaded, or refused by one error that names it: no other exception, no hang, and no
memory beyond a bound."""

from __future__ import annotations

import json
import random
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file

from damaged import OF_BYTES, OF_JSON, OF_SAFETENSORS, Damage
from slipstream import LLM, LoRARequest, SamplingParams
from slipstream.base.errors import SlipstreamError
from tiny import write_tiny
from tiny_adapter import write_adapter
from tiny_gguf import write_gguf

_CASES = 30  # of each kind
_MEMORY = 2**30  # bytes of addresses that a load may add
_MAX_MESSAGE = 1500
_DEFAULTS = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "eos_token_id": [1, 2], "do_sample": True}

Case = tuple[Path, Callable[[], None]]
"""A file to damage, and a run of the model with it."""


@pytest.fixture
def bounded_memory() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(model: Path, adapter: Path | None = None) -> None:
    lora = adapter and LoRARequest("a", 1, str(adapter))
    options = {"enable_lora": True, "max_lora_rank": 16} if adapter else {}
    with LLM(str(model), device="cpu", max_model_len=64, kv_cache_memory_bytes=2**20, **options) as llm:
        llm.generate(["ab <|im_end|>"], SamplingParams(max_tokens=2), lora_request=lora, use_tqdm=False)


def folder_file(name: str) -> Callable[[Path], Case]:
    def write(folder: Path) -> Case:
        write_tiny(folder, shards=2 if name.endswith(".index.json") else 1)
        (folder / "generation_config.json").write_text(json.dumps(_DEFAULTS))
        if name == "pytorch_model.bin":
            torch.save(load_file(folder / "model.safetensors"), folder / name)
            (folder / "model.safetensors").unlink()
        return folder / name, lambda: run(folder)

    return write


def gguf_file(folder: Path) -> Case:
    write_tiny(folder / "source")
    path = write_gguf(folder / "source", gguf.GGMLQuantizationType.Q8_0, pre="default")
    return path, lambda: run(path)


def adapter_file(name: str) -> Callable[[Path], Case]:
    def write(folder: Path) -> Case:
        base = write_tiny(folder / "base")
        patterns = {"alpha_pattern": {"q_proj": 8}, "rank_pattern": {"v_proj": 4}}
        adapter = write_adapter(folder / "adapter", base, target_modules=["q_proj", "v_proj"], **patterns)
        return adapter / name, lambda: run(base, adapter)

    return write


_KINDS: dict[str, tuple[Callable[[Path], Case], tuple[Damage, ...]]] = {
    "gguf": (gguf_file, OF_BYTES),
    "pytorch_model.bin": (folder_file("pytorch_model.bin"), OF_BYTES),
    "model.safetensors": (folder_file("model.safetensors"), OF_SAFETENSORS),
    "adapter_model.safetensors": (adapter_file("adapter_model.safetensors"), OF_SAFETENSORS),
    "adapter_config.json": (adapter_file("adapter_config.json"), OF_JSON),
    **{
        name: (folder_file(name), OF_JSON)
        for name in (
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "model.safetensors.index.json",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", _KINDS)
def test_a_damaged_file_runs_or_is_refused_by_name(tmp_path: Path, kind: str, bounded_memory: None) -> None:
    write, damages = _KINDS[kind]
    path, use = write(tmp_path)
    use()
    intact = path.read_bytes()
    num_refused = 0
    for seed in range(_CASES):
        rng = random.Random(f"{kind}{seed}")
        path.write_bytes(rng.choice(damages)(intact, rng))
        try:
            use()
        except SlipstreamError as error:
            num_refused += 1
            message = str(error)
            assert len(message) <= _MAX_MESSAGE
            assert path.name in message or str(path.parent) in message, f"case {seed}: {message}"
    assert num_refused
