"""Engines for the cells of law 7, and the comparison of their results: the same tokens, logprobs within 1e-9."""

from __future__ import annotations

import itertools

from delayed_device import DelayedDevice
from law7 import options_of
from slipstream import LLM, SamplingParams

MAX_LEN = 80
GREEDY = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, logprobs=3)  # enough to run out of pages
SHORT = GREEDY.with_changes(max_tokens=6)  # enough to cross a border of pages


def make(
    model,
    *,
    depth=0,
    late=False,
    device=None,
    max_num_seqs=None,
    speculative_config=None,
    kv_cache_dtype="auto",
    tensor_parallel_size=1,
    preempt_at=None,
    **cell,
):
    """An LLM for one cell of the matrix. `preempt_at`: step after which a cell with preemption preempts all rows, when
    they have drawn some tokens and draw more."""
    rows = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
    llm = LLM(
        model,
        skip_tokenizer_init=False,
        use_tqdm_on_load=False,
        max_model_len=MAX_LEN,
        speculative_config=speculative_config,
        kv_cache_dtype=kv_cache_dtype,
        tensor_parallel_size=tensor_parallel_size,
        **options_of(few_pages=21, depth=depth, **cell) | rows,
        _device=DelayedDevice(depth) if late else device,
    )
    if cell.get("preempted"):
        preempt_after(llm, preempt_at or (15 if cell.get("chunked") else 4))
        close = llm.close

        def check_and_close():
            assert llm.core.scheduler.num_preemptions, "no request was preempted"
            close()

        llm.close = check_and_close
    return llm


def flat(results):
    """Everything a caller sees that must not depend on scheduling."""
    rows = []
    for result in results:
        for sample in result.outputs:
            rows.append((sample.token_ids, sample.text, sample.finish_reason, sample.stop_reason))
    return rows


def logprobs(results):
    steps = [step for result in results for sample in result.outputs for step in sample.logprobs or []]
    steps += [step for result in results for step in result.prompt_logprobs or [] if step is not None]
    return [{token: entry.logprob for token, entry in step.items()} for step in steps]


def assert_same(got, wanted):
    assert flat(got) == flat(wanted)
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.prompt_token_ids == theirs.prompt_token_ids
        assert (ours.prompt_logprobs is None) == (theirs.prompt_logprobs is None)
        assert len(ours.prompt_logprobs or ours.prompt_token_ids) == len(ours.prompt_token_ids)
    ours, theirs = logprobs(got), logprobs(wanted)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        assert all(abs(a[token] - b[token]) < 1e-9 for token in a)


def preempt_after(llm, num_steps):
    """All running requests are preempted once, between two steps, whether pages run out or not. While grammars are
    compiled there are steps without a running request: then it is after a later step."""
    core, step, count, done = llm.core, llm.core.step, itertools.count(1), False

    def step_and_preempt():
        nonlocal done
        outputs, before = step(), core.scheduler.num_preemptions
        if next(count) >= num_steps and not done:
            core.scheduler.preempt_all()
            done = core.scheduler.num_preemptions > before
        return outputs

    core.step = step_and_preempt
