"""What a start must not pay for."""

from __future__ import annotations

import subprocess
import sys

import gguf
import pytest

from child import child_env
from patience import PATIENCE
from slipstream.checkpoint.model_info import read_model_info
from slipstream.config.memory import Machine
from slipstream.config.options import make_options
from slipstream.config.resolve import resolve_dtype
from tiny import write_tiny
from tiny_gguf import write_gguf

PROGRAM = """
import sys
from slipstream import LLM, SamplingParams
with LLM(sys.argv[1], use_tqdm_on_load=False, max_model_len=64, num_threads=1, skip_tokenizer_init=True) as llm:
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=2, detokenize=False), use_tqdm=False)
heavy = {"sympy", "gguf", "transformers", "torch._dynamo", "torch._inductor", "rich"} & sys.modules.keys()
assert not heavy, heavy
"""


def test_a_first_token_imports_nothing_heavy_beside_torch(tmp_path) -> None:
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.Q4_1)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)],
        env=child_env(SLIPSTREAM_NATIVE="0"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("stored", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("fast", [("float32",), ("float32", "bfloat16"), ("bfloat16", "float16", "float32")])
def test_a_checkpoint_lands_in_a_dtype_the_machine_is_good_at(tmp_path, stored: str, fast: tuple[str, ...]) -> None:
    import torch

    info = read_model_info(write_tiny(tmp_path, dtype=getattr(torch, stored)))
    chosen = resolve_dtype(make_options(), info, Machine("cpu", 2**30, 2**31, 1, fast))
    assert chosen == (stored if stored in fast else fast[0])
    assert resolve_dtype(make_options(dtype="float64"), info, Machine("cpu", 2**30, 2**31, 1, fast)) == "float64"
