"""The sampler while the host runs ahead: it reads no value, and device work reads no field too late."""

import threading

import numpy as np
import pytest
import torch
from sampling_harness import GREEDY, Harness, admission, make_plan
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from sampling_values import TRUNCATIONS, VALUES
from slipstream.device.device import Device
from slipstream.params.sampling import BENCH, SamplingParams, names_for
from slipstream.runner.sampling.stage import StageWork

EVERY_FEATURE = [
    GREEDY,
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=0, repetition_penalty=1.3),
    SamplingParams(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, frequency_penalty=0.5, min_tokens=2),
    SamplingParams(temperature=0, presence_penalty=1.0, min_tokens=3),
    *(SamplingParams(**{name: value}) for name, value in TRUNCATIONS.items()),
]

ALL = next(place for place, params in enumerate(EVERY_FEATURE) if params.top_k and params.frequency_penalty)


def fake_steps(plant=None):
    """A few steps with every feature, mixed and alone, on tensors that hold no values."""
    vocab, num = 1000, len(EVERY_FEATURE)
    with FakeTensorMode(allow_non_fake_inputs=True):
        harness = Harness(num + 1, vocab, torch.float32, Device(0, 1))
        if plant is not None:
            harness.sampler.stages.insert(1, plant)
        outputs = []
        admitted = [admission(row, params, stop_ids=(3, 4)) for row, params in enumerate(EVERY_FEATURE)]
        for step in range(2):
            for rows in [list(range(num)), *([[row] for row in range(num)] if step else [])]:
                plan = make_plan(rows, admitted, num_logprobs=step or None)
                harness.launch(plan, [2 + step] * len(rows), torch.randn(len(rows), vocab), outputs.append)
                admitted = []
        # one leaves, another takes its row and entry, the table grows
        admitted = [admission(ALL, EVERY_FEATURE[ALL], prompt=(1,), output=(4, 5), stop_ids=range(9))]
        harness.launch(
            make_plan([ALL], admitted, released=[ALL], num_logprobs=5), [3], torch.randn(1, vocab), outputs.append
        )
    return outputs


def test_no_value_is_read_on_the_host():
    outputs = fake_steps()
    assert outputs[0].tokens.shape == (len(EVERY_FEATURE),)
    assert outputs[-1].logprobs.top.shape == (1, 5)


class Planted:
    """A stage that applies the test's function to the logits."""

    def __init__(self, edit) -> None:
        self.edit = edit

    def apply(self, plan) -> None:
        pass

    def flush(self, upload) -> None:
        pass

    def is_used_by(self, rows):
        return True

    def work(self, rows):
        return StageWork(None, self.edit)


@pytest.mark.parametrize(
    "look",
    [
        lambda logits, batch: logits.max().item(),
        lambda logits, batch: bool((logits > 0).any()),
        lambda logits, batch: int(batch.positions[0]),
        lambda logits, batch: torch.multinomial(logits.softmax(-1), 1).tolist(),
        lambda logits, batch: logits[logits > 0],
        lambda logits, batch: batch.rows.nonzero(),
    ],
)
def test_a_planted_host_read_is_caught(look):
    with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
        fake_steps(Planted(look))


def test_a_planted_stage_without_host_reads_passes():
    edited = []
    fake_steps(Planted(lambda logits, batch: edited.append(logits.mul_(2))))
    assert edited


VOCAB, NUM_ROWS = 11, 21  # few tokens, so that every stage changes what is drawn; rows for tables to grow


def any_params(rng):
    """Each feature with probability 1/2."""

    def maybe(value, otherwise):
        return value if rng.random() < 0.5 else otherwise

    return SamplingParams(
        temperature=maybe(float(rng.choice([0.3, 1.0, 4.0])), 0.0),
        min_tokens=maybe(int(rng.integers(1, 5)), 0),
        **{name: value for name in names_for(BENCH) if name != "temperature" and (value := maybe(VALUES[name], None))},
    )


def story(seed, num_steps=60):
    """Requests that are admitted and released, as plans and positions: more and more, and few that stay long."""
    rng = np.random.default_rng(seed)
    free, running, plans, released = list(range(NUM_ROWS - 1)), {}, [], []
    for step in range(num_steps):
        admitted = []
        while free and len(running) < 3 + step // 3:
            row = free.pop(int(rng.integers(len(free))))
            prompt = rng.integers(0, VOCAB, int(rng.integers(1, 6))).tolist()
            output = rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist()
            stop_ids = rng.choice(VOCAB, int(rng.integers(1, 9)), replace=False).tolist()
            new = admission(row, any_params(rng), prompt, output, seed=step, sample=row, stop_ids=stop_ids)
            admitted.append(new)
            running[row] = len(prompt) + len(output)
        rows = [row for row in running if rng.random() < 0.8]
        positions = [running[row] for row in rows]
        plans.append((make_plan(rows, admitted, released, num_logprobs=[None, 0, 3][step % 3], step=step), positions))
        for row in rows:
            running[row] += 1
        released = [row for row in running if rng.random() < 0.3]
        for row in released:
            del running[row]
            free.append(row)
    return plans


def tell(plans, device, ahead, *, captures=False):
    """Run a sequence of steps in groups; the device starts a group when the host has launched all of it.

    Each step's logits depend on the tokens drawn before, as those of a model do.
    """
    harness = Harness(NUM_ROWS, VOCAB, torch.float64, device, num_slots=ahead + 2, captures=captures)
    table = torch.as_tensor(np.random.default_rng(0).normal(0, 2, (101, VOCAB)))
    last = torch.zeros(NUM_ROWS, dtype=torch.int64)
    outputs = []

    def logits(batch):
        return table[(last[batch.rows] + 7 * batch.positions) % 101]

    def keep(rows):
        def deliver(output):
            last[torch.as_tensor(rows.astype(np.int64))] = output.tokens
            outputs.append(output)

        return deliver

    for first in range(0, len(plans), ahead + 1):
        gate = threading.Event()
        if ahead:
            device.compute.run(gate.wait)
        for plan, positions in plans[first : first + ahead + 1]:
            harness.launch(plan, positions, logits, keep(plan.rows))
        gate.set()
        device.compute.record().wait()
    device.close()
    return outputs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("ahead", "captures"), [(2, False), (0, True)], ids=["ahead", "captured"])
def test_steps_ahead_and_captured_ones_give_the_same_tokens(seed, ahead, captures):
    plans = story(seed)
    inline, other = tell(plans, Device(0, 1), 0), tell(plans, Device(ahead, 1), ahead, captures=captures)
    assert len(inline) == len(other) == len(plans)
    assert sum(len(output.tokens) for output in inline) > 400
    for a, b in zip(inline, other, strict=True):
        assert torch.equal(a.tokens, b.tokens)
        assert (a.logprobs is None) == (b.logprobs is None)
        if a.logprobs is not None:
            for x, y in zip(a.logprobs, b.logprobs, strict=True):
                assert torch.equal(x, y[:, : x.shape[1]] if x.ndim > 1 else y)


def test_a_step_uploads_little():
    """The arena is sized by rows: no feature may upload more than this, except histories and stop ids."""
    num = 64
    params = EVERY_FEATURE[ALL]
    harness = Harness(num + 1, 100)
    admitted = [admission(row, params, prompt=(1,), stop_ids=(2,)) for row in range(num)]
    harness.step(range(num), [1] * num, np.zeros((num, 100)), admitted)
    assert harness.staged < 256 * num + 1024
