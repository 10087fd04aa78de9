"""The survey of vLLM's own tests: its import hook, its tokenizers and its scope. scripts/vllm_survey runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tokenizers import Tokenizer

from child import child_env
from vllm_survey import tokenizers
from vllm_survey.cases import EXAMPLES, GROUPS, IMAGES, out_of_scope
from vllm_survey.hub import E5_IDS, QWEN_IDS

SITE = Path(__file__).parent / "vllm_survey" / "site"
SENTENCE = "The chef prepared a delicious meal."
SCRIPT = """
import slipstream, vllm.envs
from vllm import SamplingParams
from vllm.entrypoints.llm import LLM
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.utils.argparse_utils import FlexibleArgumentParser

class Mine(PrometheusStatLogger): ...

assert LLM is slipstream.LLM and SamplingParams is slipstream.SamplingParams
assert vllm.LLM is LLM and vllm.envs.VLLM_ANYTHING is None
parser = FlexibleArgumentParser()
parser.add_argument("--max-model-len")
assert parser.parse_args(["--max_model_len=3"]).max_model_len == "3"
try:
    Mine()
except NotImplementedError as error:
    assert "Mine of vLLM is not here" in str(error)
else:
    raise AssertionError("made")
"""


def test_imports_of_vllm_give_our_names_and_others_fail_where_they_are_used(monkeypatch):
    monkeypatch.syspath_prepend(SITE)
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=child_env(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_tokenizers_have_the_ids_that_vllms_tests_expect(tmp_path):
    trained = tokenizers.train("The chef preparing a delicious meal " + " ".join(f"{n:x}" for n in range(40_000)))
    tokenizers.write_merged(tmp_path, QWEN_IDS, trained.to_str())
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(SENTENCE).ids
    assert found == [785, 29706, 10030, 264, 17923, 15145, 13]
    tokenizers.write_table(tmp_path, E5_IDS, ("<s>", "</s>"))
    found = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(SENTENCE).ids
    assert found == [0, 581, 21861, 133888, 10, 8, 150, 60744, 109911, 5, 2]


def test_scope():
    assert out_of_scope("tests/v1/engine/test_async_llm.py::test_load[engine_args1-prompt1-1]") == IMAGES
    assert out_of_scope("tests/v1/engine/test_async_llm.py::test_load[engine_args0-Hello-1]") is None
    files = [file for group in GROUPS.values() for file in group]
    assert len(files) == len(set(files)) > 40 and len(EXAMPLES) > 35
