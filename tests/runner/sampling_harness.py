"""A sampler on its own: hand-made plans, logits from the test, and the stages again in plain numpy as a reference."""

from __future__ import annotations

import math

import numpy as np
import torch

from slipstream.contracts.step import NO_INTS, Admission, StepPlan
from slipstream.device.device import Device
from slipstream.params.sampling import SamplingParams
from slipstream.runner.sampling.logprobs import ReportedValues
from slipstream.runner.sampling.sampler import DrawOutput, Sampler
from slipstream.runner.sampling.stage import DrawBatch
from slipstream.runner.staging import HostRing

GREEDY = SamplingParams(temperature=0)


def admission(
    row, params, prompt=(1, 2), output=(), *, seed=0, sample=0, stop_ids=(), number=0, bad_words=()
) -> Admission:
    history = np.array([*prompt, *output], np.int32)
    return Admission(
        row=row,
        number=number,
        num_prompt_tokens=len(prompt),
        num_known=len(history),
        num_cached=0,
        params=params,
        seed=seed,
        sample=sample,
        stop_ids=tuple(stop_ids),
        history=history if params.needs_history else None,
        bad_words=tuple(map(tuple, bad_words)),
    )


def make_plan(rows, admitted=(), released=(), num_logprobs=None, step=0) -> StepPlan:
    count = len(rows)
    return StepPlan(
        step=step,
        released=np.array(released, np.int32),
        admitted=tuple(admitted),
        rows=np.array(rows, np.int32),
        num_tokens=np.ones(count, np.int32),
        lengths=np.ones(count, np.int32),
        num_drawn=np.ones(count, np.int32),
        num_host_tokens=np.zeros(count, np.int32),
        tokens=NO_INTS,
        new_pages=(),
        num_logprobs=num_logprobs,
    )


class Harness:
    """Runs steps of a sampler as a runner does."""

    def __init__(
        self,
        num_rows,
        vocab_size,
        dtype=torch.float64,
        device=None,
        num_slots=4,
        capacity=1 << 20,
        max_ids=1 << 20,
        logprobs_mode="raw_logprobs",
        captures=False,
    ) -> None:
        """`captures`: steps run the work that would be captured, where there is some."""
        self.captures = captures
        self.device = device or Device(0, 1)
        self.dtype = dtype
        self.sampler = Sampler(num_rows, vocab_size, self.device, dtype, max_ids, logprobs_mode=logprobs_mode)
        self.ring = HostRing(num_slots, capacity, self.device)

    def launch(self, plan: StepPlan, positions, logits, deliver, late=None) -> None:
        """Queue one step. `logits` is a tensor, or makes one from the DrawBatch on the device."""
        self.sampler.apply(plan)
        upload = self.ring.open()
        self.sampler.flush(upload)
        sample = self.sampler.prepare(plan, capture=self.captures)
        spans = [upload.put(index) for index in sample.indices]
        rows_span = upload.put(plan.rows.astype(np.int64))
        positions_span = upload.put(np.array(positions, np.int64))
        upload.send(self.device.compute)
        if late is not None:
            self.sampler.send(late)
        self.staged = upload._used

        def run() -> None:
            batch = DrawBatch(upload.tensor(rows_span).clone(), upload.tensor(positions_span).clone())
            indices = [upload.tensor(span) for span in spans]
            deliver(sample(logits(batch) if callable(logits) else logits.clone(), batch, indices))

        self.device.compute.run(run)

    def step(self, rows, positions, logits, admitted=(), released=(), num_logprobs=None, late=None) -> DrawOutput:
        outputs: list[DrawOutput] = []
        plan = make_plan(rows, admitted, released, num_logprobs)
        logits = logits if callable(logits) else torch.as_tensor(np.array(logits)).to(self.dtype)
        self.launch(plan, positions, logits, outputs.append, late)
        self.device.compute.record().wait()
        return outputs[0]

    def edited(self, rows, positions, logits, admitted=(), released=()) -> np.ndarray:
        """The logits as the draw sees them, after all stages."""
        sampler, before = self.sampler, self.sampler._values
        sampler._values = ReportedValues(is_processed=True, are_logits=True)
        try:
            top = self.step(rows, positions, logits, admitted, released, num_logprobs=sampler.vocab_size).logprobs
        finally:
            sampler._values = before
        return torch.zeros_like(top.top).scatter_(1, top.top_ids, top.top).numpy()


def penalized(logits, prompt, output, params: SamplingParams):
    """One row, one token at a time."""
    result = np.array(logits, np.float64)
    for token in range(len(result)):
        count = list(output).count(token)
        if token in prompt or count:
            if result[token] > 0:
                result[token] /= params.repetition_penalty
            else:
                result[token] *= params.repetition_penalty
        result[token] -= params.frequency_penalty * count
        result[token] -= params.presence_penalty * (count > 0)
    return result


def truncated(logits, params: SamplingParams):
    """One row: temperature, min-p and top-a, top-k, top-p, in that order, by their definitions."""
    scaled = np.array(logits, np.float64) / params.temperature
    order = sorted(range(len(scaled)), key=lambda i: -scaled[i])
    best = scaled[order[0]]
    likeliest = 1 / math.fsum(math.exp(x - best) for x in scaled)
    if params.top_a > 0:
        order = [i for i in order if likeliest * math.exp(scaled[i] - best) >= params.top_a * likeliest**2]
    if params.min_p > 0:
        order = [i for i in order if scaled[i] >= best + math.log(params.min_p)]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        weights = [math.exp(scaled[i] - best) for i in order]
        before, count = 0.0, 0
        while count < len(order) and before < params.top_p * math.fsum(weights):
            before += weights[count]
            count += 1
        order = order[:count]
    return np.where(scaled >= scaled[order[-1]], scaled, -np.inf)


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
