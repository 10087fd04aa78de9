"""The FakeTensor net: plan, launch and finish with tensors that have no values.

Whatever looks at a value on the way to the device raises here, at any depth of calls: `.item()`, `bool(t)`, `x[mask]`,
`nonzero`, `unique`, a count for `repeat_interleave`.
"""

from __future__ import annotations

import pytest
import torch
from fake_mode import NO_VALUES
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from replay_device import ReplayDevice
from sampling_values import DRAWN, TRUNCATIONS, VALUES, with_value
from slipstream import LLM, SamplingParams
from slipstream.contracts.step import StepResult
from slipstream.params.sampling import BENCH, names_for
from tiny import LONG_ROPE, write_tiny


class _Tokens:
    """A logits processor that sees tokens."""

    needs = "tokens"

    def __call__(self, output_ids):
        return {len(output_ids): 3.0, 7: -1.0} if len(output_ids) % 2 else range(40)


def _edit(output_ids, logits):
    logits[len(output_ids)] += 1.0
    return logits


# each takes the two chunks of its prompt, a step that is captured, one that is replayed, and one with a new page
FEATURES = {
    "greedy": SamplingParams(temperature=0, max_tokens=4),
    "random": SamplingParams(temperature=0.8, max_tokens=4),
    "truncated": SamplingParams(**TRUNCATIONS, max_tokens=4),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5, max_tokens=4),
    "whole vocabulary": SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=4),
    "grammar": with_value("structured_outputs", max_tokens=4),
    "everything": SamplingParams(**{name: VALUES[name] for name in DRAWN} | dict(max_tokens=6, detokenize=True, n=2)),
} | {
    name: with_value(name, max_tokens=4 + 2 * (name == "min_tokens"))
    for name in DRAWN
    if name not in ("detokenize", "truncate_prompt_tokens", "stop", *names_for(BENCH))
}

OF_TOKENS = SamplingParams(logits_processors=[_Tokens()], max_tokens=6)
OF_LOGITS = SamplingParams(logits_processors=[_edit], max_tokens=6)
LONG = [SamplingParams(temperature=0, max_tokens=12)] * 3  # few pages do not hold them
THINKING = SamplingParams(thinking_token_budget=2, max_tokens=6)


# with a layer of each kind: a further one runs the same code
FAMILIES = {
    "llama": {"num_hidden_layers": 1},
    "qwen3": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), request.param, **FAMILIES[request.param]))


# The sampler does not depend on the family: all features one by one over one family, over the others all features at
# once, with positions of the prompt and two samples, whose states and pages are copied.
FEATURES_OF = [("llama", feature) for feature in FEATURES] + [(family, "everything") for family in [*FAMILIES][1:]]
each_feature = pytest.mark.parametrize(("folder", "feature"), FEATURES_OF, indirect=["folder"])


def drive(
    folder, params, *, num_pages=64, preempts=False, break_model=None, device=None, drafts=None, whole=True
) -> int:
    """Run an engine whose device has no values; the tokens are invented. Returns the number of steps."""
    options = dict(use_tqdm_on_load=False, page_size=4, max_num_seqs=4, max_num_batched_tokens=8)
    options["max_model_len"] = min(64, 4 * num_pages)
    options["reasoning_config"] = {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}
    with LLM(folder, **options, num_pages=num_pages, num_threads=1, _device=device, drafts=drafts) as llm:
        core, runner = llm.core, llm.core.executor
        core.constraints.min_budget = 60.0  # no mask and no processor is slow
        runner.whole_steps = whole
        runner.graphs.token_sizes = []  # the CPU's attention goes row by row through longer chunks
        if break_model is not None:
            break_model(runner)
        for i, one in enumerate(params):
            if one.structured_outputs is not None:
                core.constraints.grammars.compile(one.structured_outputs).result()
            core.submit(llm.inputs.prepare(f"r{i}", list(range(3 + i, 14 + i)), one)[0])
        submitted = [sample for samples in core.scheduler._lifecycle.live.values() for sample in samples]
        steps = 0
        with NO_VALUES:
            while (plan := core.scheduler.plan()) is not None:
                runner.launch(plan)
                is_drawing = core.constraints.is_drawing
                core.constraints.launch(0.0)
                handle = runner.finish(core.constraints.late() if is_drawing else None)
                result = handle.wait()  # the buffer's memory, which nothing wrote
                count = int(plan.num_drawn.sum())
                # of a row with drafts the first token is accepted
                counts = None if result.counts is None else result.counts * 0 + 1
                failed, reports = result.failed & False, (result.logprobs, result.prompt_logprobs)
                core.scheduler.commit(
                    StepResult(result.tokens * 0 + 5, failed, *reports, counts=counts)
                    if count
                    else StepResult(result.tokens, result.failed, None, result.prompt_logprobs)
                )
                steps += 1
        assert not core.scheduler.has_requests() and (core.scheduler.num_preemptions > 0) == preempts
        # an exception on the way to a processor ends its request only
        assert not [sample.processors.error for sample in submitted if sample.processors and sample.processors.error]
        return steps


@each_feature
def test_no_step_looks_at_a_value(folder, feature):
    assert drive(folder, [FEATURES[feature]]) > 4


@pytest.mark.every_second("folder", "feature", "whole")
@each_feature
@pytest.mark.parametrize("whole", [True, False], ids=["one graph", "two graphs"])
def test_no_captured_step_looks_at_a_value(folder, feature, whole):
    """Padded, with what each row asks for read from tables on the device."""
    device = ReplayDevice(0)
    assert drive(folder, [FEATURES[feature]], device=device, whole=whole) > 4
    assert device.num_replays > (not whole)  # the first is the capture


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
def test_all_features_together_with_preemption(folder):
    assert drive(folder, [*LONG, *FEATURES.values()], num_pages=10, preempts=True) > 20


@pytest.mark.parametrize("folder", ["gemma2", "qwen3_5"], indirect=True)
def test_windows_and_states_with_preemption(folder):
    assert drive(folder, [*LONG, FEATURES["everything"]], num_pages=10, preempts=True) > 20


@pytest.mark.parametrize("device", [None, ReplayDevice(0)], ids=["eager", "captured"])
def test_no_step_with_drafts_looks_at_a_value(tmp_path, device):
    names = ("greedy", "truncated", "penalties", "min_tokens", "logprobs", "logit_bias", "bad_words", "n")
    params = [FEATURES[name] for name in names] + [THINKING, OF_TOKENS] + ([OF_LOGITS] if device is None else [])
    folder = str(write_tiny(tmp_path, "llama", num_hidden_layers=1))
    assert drive(folder, params, device=device, drafts="ngram:2") > 20


@pytest.mark.parametrize("device", [None, ReplayDevice(0)], ids=["eager", "captured"])
def test_no_step_looks_at_a_value_to_choose_rope_factors(tmp_path, device):
    """A request that begins with the short factors and changes to the long ones, beside one that has the long ones."""
    rope = {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 11}
    folder = str(write_tiny(tmp_path, "phi3", num_hidden_layers=1, **rope))
    params = [FEATURES["greedy"], SamplingParams(temperature=0, truncate_prompt_tokens=5, max_tokens=9)]
    assert drive(folder, params, device=device) > 9


PLANTED = {
    "item": lambda x: x * x.sum().item(),
    "bool": lambda x: x if bool(x.sum() > 0) else -x,
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: torch.repeat_interleave(x, (x[:, 0] > 0).long() + 1, dim=0),
}


@pytest.mark.parametrize("folder", ["llama"], indirect=True)
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_look_at_a_value_is_caught(folder, bug):
    def plant(runner):
        block = runner.model.layers[0]
        forward = block.forward
        block.forward = lambda *args: (PLANTED[bug](args[0]), forward(*args))[1]

    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        drive(folder, [FEATURES["greedy"]], break_model=plant)
