"""Engines with quantised weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quantized_checkpoint import quantize, quantize_mxfp4
from replay_device import ReplayDevice
from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.ops.gemm.description import Gemm
from slipstream.ops.gemm.quantized import QuantizedMatrix, matrix
from slipstream.ops.gemm.table import multiply
from tiny import write_tiny, write_weights
from tiny_gguf import K_SIZES, write_gguf

SMALL: dict[str, Any] = dict(max_model_len=128, num_pages=32, max_num_seqs=4, use_tqdm_on_load=False)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def tokens(folder: Path, **options: Any) -> list[list[int]]:
    with LLM(str(folder), **SMALL | options) as llm:
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, GREEDY)]


def test_tokens_are_those_of_the_dequantised_checkpoint(tmp_path: Path) -> None:
    folder, plain = write_tiny(tmp_path / "q", "llama"), write_tiny(tmp_path / "plain", "llama")
    write_weights(plain, quantize(folder, "awq"))
    assert tokens(folder, quantization="awq", dtype="float64") == tokens(plain, dtype="float64")


@pytest.mark.parametrize("method", ["fp8 static", "fp8 dynamic", "fp8 block"])
def test_tokens_and_logprobs_are_those_of_transformers(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which dequantises FP8 on a CPU too. Its check for a package that places modules on devices is passed over."""
    from transformers import AutoModelForCausalLM
    from transformers.quantizers import quantizer_finegrained_fp8

    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda: True)
    folder = write_tiny(tmp_path, "ministral3")
    quantize(folder, method)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).double().eval()
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    with LLM(str(folder), **SMALL, dtype="float64") as llm:
        batched, alone = llm.generate(PROMPTS, params), [llm.generate([prompt], params)[0] for prompt in PROMPTS]
    for results in (batched, alone):
        for prompt, result in zip(PROMPTS, results, strict=True):
            output = result.outputs[0]
            with torch.no_grad():
                logits = oracle(torch.tensor([prompt + list(output.token_ids)])).logits[0, len(prompt) - 1 : -1]
            assert list(output.token_ids) == logits.argmax(-1).tolist()
            for wanted, found in zip(logits.log_softmax(-1), output.logprobs, strict=True):
                assert all(abs(wanted[token].item() - one.logprob) < 1e-5 for token, one in found.items())


def test_the_option_must_be_the_method_of_the_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama")
    quantize(folder, "w4a16")
    with pytest.raises(InvalidOption, match="'gptq', and the checkpoint is quantised by compressed-tensors"):
        LLM(str(folder), quantization="gptq", **SMALL)


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["awq", "gptq act-order", "fp8 block", "fp8 channel", "w8a16", "nf4 double"])
def test_a_gpu_keeps_weights_quantised(method: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "llama", intermediate_size=128)
    quantize(folder, method)
    kept = tokens(folder, device="cuda", dtype="bfloat16")
    with LLM(str(folder), device="cuda", dtype="bfloat16", **SMALL) as llm:
        logprobs = [r.outputs[0].logprobs for r in llm.generate(PROMPTS, SamplingParams(max_tokens=1, logprobs=5))]
    with LLM(str(folder), device="cuda", dtype="bfloat16", dequantize=True, **SMALL) as llm:
        expected = [r.outputs[0].logprobs for r in llm.generate(PROMPTS, SamplingParams(max_tokens=1, logprobs=5))]
    assert all(len(line) == 6 for line in kept)
    for found, wanted in zip(logprobs, expected, strict=True):
        common = found[0].keys() & wanted[0].keys()
        assert len(common) >= 3
        # FP8 methods round the inputs of every GEMM as well, which `dequantize` does not
        bound = 0.6 if method.startswith("fp8") else 0.15
        assert all(abs(found[0][token].logprob - wanted[0][token].logprob) < bound for token in common)


@pytest.mark.cuda
@pytest.mark.parametrize("method", ["mxfp4", "awq", "fp8 block"])
def test_a_gpu_keeps_experts_quantised(method: str, tmp_path: Path) -> None:
    """Graphs and all; beside the dequantised checkpoint."""
    if method == "mxfp4":
        folder = write_tiny(tmp_path, "gpt_oss")
        quantize_mxfp4(folder)
    else:
        folder = write_tiny(tmp_path, "qwen3_moe", moe_intermediate_size=64)
        quantize(folder, method)
    params = SamplingParams(max_tokens=1, logprobs=5, temperature=0)
    found, expected = [], []
    for dequantize, results in ((False, found), (True, expected)):
        with LLM(str(folder), device="cuda", dtype="bfloat16", dequantize=dequantize, **SMALL) as llm:
            results += [r.outputs[0].logprobs[0] for r in llm.generate(PROMPTS, params)]
            assert all(len(r.outputs[0].token_ids) == 6 for r in llm.generate(PROMPTS, GREEDY))
    for line, wanted in zip(found, expected, strict=True):
        common = line.keys() & wanted.keys()
        assert len(common) >= 3
        # rounding may change which experts a router chooses
        assert all(abs(line[token].logprob - wanted[token].logprob) < 1.0 for token in common)


@pytest.mark.cuda
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K"])
def test_a_gpu_keeps_gguf_weights_low_bit(kind: str, tmp_path: Path) -> None:
    import gguf

    path = write_gguf(write_tiny(tmp_path, **K_SIZES), gguf.GGMLQuantizationType[kind], pre="default")
    params = SamplingParams(max_tokens=1, logprobs=5, temperature=0)
    found, expected = [], []
    for dequantize, results in ((False, found), (True, expected)):
        with LLM(str(path), device="cuda", dtype="bfloat16", dequantize=dequantize, **SMALL) as llm:
            results += [r.outputs[0].logprobs[0] for r in llm.generate(PROMPTS, params)]
            assert all(len(r.outputs[0].token_ids) == 6 for r in llm.generate(PROMPTS, GREEDY))
    for line, wanted in zip(found, expected, strict=True):
        common = line.keys() & wanted.keys()
        assert len(common) >= 3
        assert all(abs(line[token].logprob - wanted[token].logprob) < 0.5 for token in common)


@pytest.mark.cuda
@pytest.mark.parametrize("is_static", [False, True])
def test_gemm_of_many_rows_in_fp8(is_static: bool) -> None:
    torch.manual_seed(0)
    values = (torch.randn(96, 256, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = QuantizedMatrix(values, torch.rand(96, 1, device="cuda") * 0.01, None)
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor([0.01], device="cuda") if is_static else None
    found = multiply(Gemm(x, weight._replace(quantizes_inputs=True, input_scale=scale)))
    expected = matrix.scaled_linear(x, weight, None, scale)
    assert (found - expected).float().norm() < 0.01 * expected.float().norm()


@pytest.mark.cuda
def test_batch_invariant_rows_have_the_same_bits() -> None:
    torch.manual_seed(0)
    values = (torch.randn(96, 256, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = QuantizedMatrix(values, torch.rand(96, 1, device="cuda") * 0.01, None)
    x = torch.randn(200, 256, device="cuda", dtype=torch.bfloat16)
    weight = weight._replace(batch_invariant=True)
    whole = multiply(Gemm(x, weight))
    for count in (1, 3, 65):
        assert torch.equal(multiply(Gemm(x[:count], weight)), whole[:count])


class WarmDevice(ReplayDevice):
    """Starts as a GPU does: a dry run before the first request."""

    warms_up = True


class LookUp:
    """A warm-up that looks up one token in the dry run."""

    def __init__(self, runner: Any, config: Any) -> None:
        self.model = runner.model

    def dry_run(self) -> None:
        assert self.model.embedding(torch.tensor([3])).any(), "the rows are read"

    def capture(self) -> None: ...
    def run_largest(self) -> None: ...


def test_a_dry_run_has_the_weights_whose_layout_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of a GGUF weight exist after its pieces are read; others are allocated before."""
    import gguf

    from slipstream.runner import build

    monkeypatch.setattr(build, "can_compile_ahead", lambda: False)
    monkeypatch.setattr(build, "_warm_up", LookUp)
    path = write_gguf(write_tiny(tmp_path), gguf.GGMLQuantizationType.Q4_0, pre="default")
    LLM(str(path), _device=WarmDevice(1), num_threads=1, **SMALL).close()
