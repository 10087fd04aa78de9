"""Drafters that run a model, on a GPU: captured with the head, nothing waits, and the tokens are the CPU's."""

from __future__ import annotations

import pytest

from draft_spy import DraftSpy
from quantized_checkpoint import quantize
from slipstream import LLM, SamplingParams
from slipstream.device.sync_check import watch
from slipstream.nn.weights.quantized_weight import QuantizedWeight
from slipstream.runner.model_drafter import BlockDrafter, HeadDrafter
from tiny import write_tiny
from tiny_drafters import write_dflash, write_eagle3, write_few, write_mtp

pytestmark = pytest.mark.cuda

PROMPTS = [[i + 3, *range(20, 20 + 7 * i), i + 5] for i in range(8)]
OPTIONS = dict(use_tqdm_on_load=False, max_model_len=128, page_size=16, num_pages=96, max_num_seqs=8, dtype="float32")
ASKED = [
    SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, top_p=0.95, max_tokens=20, ignore_eos=True),
    SamplingParams(temperature=0, repetition_penalty=1.3, max_tokens=20),
]


def tokens(results):
    return [sample.token_ids for result in results for sample in result.outputs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("drafters")
    other = dict(num_hidden_layers=1, num_attention_heads=2, head_dim=64)
    return {"same": str(write_tiny(root / "same", head_dim=64)), "other": str(write_tiny(root / "other", **other))}


@pytest.fixture(scope="module")
def wanted(folders):
    with LLM(folders["same"], **OPTIONS, device="cpu", num_threads=1) as llm:
        return [tokens(llm.generate(PROMPTS, params)) for params in ASKED]


def run(model, speculative_config, wanted, options):
    """The counts of greedy requests, after all tokens were compared."""
    options = OPTIONS | dict(num_speculative_tokens=3) | options
    num = options.pop("num_speculative_tokens")
    spec = speculative_config | {"num_speculative_tokens": num}
    with LLM(model, **options, device="cuda", speculative_config=spec) as llm:
        llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
        for _ in range(2):
            for params, results in zip(ASKED, wanted, strict=True):
                assert tokens(llm.generate(PROMPTS, params)) == results
        counts = llm.core.scheduler.drafts.counts
        before = counts.num_drafts, counts.num_accepted
        with watch() as log:
            llm.generate(PROMPTS, ASKED[0])
        assert not log.found, "\n".join(f"{sync.what} x{sync.count}\n{sync.stack}" for sync in log.found)
        graphs = llm.core.executor.graphs
        if not options.get("enforce_eager"):
            captured = [key for key, entry in graphs._captured.items() if entry is not None]
            assert any(key[0] == "head" and key.drafts[0] for key in captured) and not graphs.gave_up
        llm.core.scheduler.cache.check()
        return counts.num_drafts - before[0], counts.num_accepted - before[1]


@pytest.mark.parametrize("options", [dict(enforce_eager=True, depth=0), dict(depth=1), dict(depth=2, num_pages=24)])
@pytest.mark.parametrize("draft", ["same", "other"])
def test_draft_models(folders, wanted, options, draft):
    config = {"method": "draft_model", "model": folders[draft]}
    num_drafts, num_accepted = run(folders["same"], config, wanted, options)
    assert num_drafts > 20
    if draft == "same":
        assert num_accepted > 0.95 * num_drafts  # float32 rounds differently in other batches


@pytest.mark.parametrize("options", [dict(enforce_eager=True, depth=0), dict(depth=2, num_pages=24)])
def test_mtp(tmp_path_factory, options):
    model = str(write_mtp(tmp_path_factory.mktemp("mtp"), kv_lora_rank=512, qk_rope_head_dim=64))
    with LLM(model, **OPTIONS, device="cpu", num_threads=1) as llm:
        results = [tokens(llm.generate(PROMPTS, params)) for params in ASKED]
    num_drafts, num_accepted = run(model, {"method": "mtp"}, results, options)
    assert 0 < num_accepted < num_drafts


@pytest.mark.parametrize("options", [dict(enforce_eager=True, depth=0), dict(depth=2, num_pages=24)])
@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_drafters_with_taps(tmp_path_factory, options, method):
    folder = tmp_path_factory.mktemp(method)
    model = write_few(folder / "model", head_dim=64)
    head = (write_dflash if method == "dflash" else write_eagle3)(folder / "head", model)
    with LLM(str(model), **OPTIONS, device="cpu", num_threads=1) as llm:
        results = [tokens(llm.generate(PROMPTS, params)) for params in ASKED]
    config = {"method": method, "model": str(head)}
    num_drafts, num_accepted = run(str(model), config, results, options)
    assert 0 < num_accepted < num_drafts


QUANTIZED = {
    "deepseek_v3": ("fp8 block", "eh_proj", dict(kv_lora_rank=512, qk_rope_head_dim=64, q_lora_rank=64, v_head_dim=16)),
    "glm4_moe": ("fp8 channel", "no such module", {}),
    "qwen3_next": ("w4a16", "linear_attn", dict(shared_expert_intermediate_size=64, head_dim=64)),
}


@pytest.mark.parametrize("family", QUANTIZED)
def test_mtp_of_quantised_checkpoints(tmp_path, family):
    """Most proposals are those with the weights dequantised, whose sums are rounded in other ways."""
    method, skip, sizes = QUANTIZED[family]
    model = write_mtp(tmp_path, family, moe_intermediate_size=64, intermediate_size=128, **sizes)
    quantize(model, method, skip)
    spec, found = {"method": "mtp", "num_speculative_tokens": 2}, []
    many = [[i, *prompt] for prompt in PROMPTS for i in range(60, 66)]  # texts part where a token is another
    for dequantize, eager in ((True, True), (False, True), (False, False)):
        options = OPTIONS | dict(dtype="bfloat16", device="cuda", dequantize=dequantize, enforce_eager=eager)
        with LLM(str(model), **options, depth=0 if eager else 2, speculative_config=spec) as llm:
            llm.core.scheduler.drafts.length = None  # all plans have drafts, whatever they cost
            head = llm.core.executor.find(HeadDrafter | BlockDrafter).model
            assert any(isinstance(module, QuantizedWeight) for module in head.modules()) != dequantize
            spy = DraftSpy(llm) if eager else None
            llm.generate(many, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            if spy is not None:
                found.append({tuple(tokens): drafts for tokens, drafts in spy.proposals})
                continue
            with watch() as log:
                llm.generate(PROMPTS, ASKED[0])
            assert not log.found and not llm.core.executor.graphs.gave_up
    common = found[0].keys() & found[1].keys()
    equal = sum(found[0][tokens][0] == found[1][tokens][0] for tokens in common)
    assert len(common) > 20 and equal > 0.6 * len(common), f"{equal} of {len(common)}"
