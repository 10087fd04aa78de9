"""LLM: the shapes people know."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import threading
import weakref

import pytest

from patience import PATIENCE
from slipstream import LLM, SamplingParams
from slipstream.base.errors import EngineClosed, EngineDead, InvalidParams, InvalidPrompt, PromptTooLong
from slipstream.front import prompts as prompts_module
from slipstream.scheduler.planners import Admitter
from tiny import write_tiny
from tiny_tokenizer import IM_END, IM_START

SMALL = dict(use_tqdm_on_load=False, max_model_len=64, num_pages=64, page_size=4, max_num_seqs=4, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(write_tiny(tmp_path_factory.mktemp("tiny"), "llama"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(folder, **SMALL) as llm:
        yield llm


FOUR = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_every_form_of_prompt_gives_the_same(llm):
    ids = llm.tokenizer.encode("Hello")
    forms = ["Hello", ids, {"prompt": "Hello"}, {"prompt_token_ids": ids}, tuple(ids)]
    results = [llm.generate(form, FOUR)[0] for form in forms]
    assert len({tuple(r.outputs[0].token_ids) for r in results}) == 1
    together = llm.generate(forms, FOUR)
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in results]
    assert results[0].prompt == "Hello"
    assert results[0].prompt_token_ids == ids


TEXTS = [f"text {place}, {'x' * (place % 7)}" for place in range(40)]


@pytest.fixture
def encoded(llm, monkeypatch):
    """Texts as they are encoded, a few characters at a time."""
    monkeypatch.setattr(prompts_module, "_MAX_PART", 10)
    portions, encode = [], type(llm.tokenizer).encode_batch

    def watched(self, texts, *how):
        portions.append(list(texts))
        return encode(self, texts, *how)

    monkeypatch.setattr(type(llm.tokenizer), "encode_batch", watched)
    return portions


def test_texts_are_encoded_together_and_stay_what_they_are(llm, encoded):
    prompts = ["Hello", {"prompt": "wide world", "cache_salt": "s"}, [5, 6], "ab", {"prompt_token_ids": [7]}, "c"]
    alone = [llm.generate([prompt], FOUR)[0] for prompt in prompts]
    encoded.clear()
    together = llm.generate(prompts, FOUR)
    assert encoded == [["Hello", "wide world"], ["ab", "c"]]
    assert [r.prompt_token_ids for r in together] == [r.prompt_token_ids for r in alone]
    assert [r.prompt for r in together] == ["Hello", "wide world", None, "ab", None, "c"]
    assert [r.outputs[0].token_ids for r in together] == [r.outputs[0].token_ids for r in alone]


def texts_of(results):
    return [result.outputs[0].token_ids for result in results]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_texts_are_encoded_while_the_device_works(folder, llm, encoded, depth):
    wanted = texts_of(llm.generate(TEXTS, FOUR))
    with LLM(folder, **SMALL, depth=depth) as own:
        launch, seen = own.core.executor.launch, []
        own.core.executor.launch = lambda plan: (seen.append(sum(map(len, encoded))), launch(plan))
        encoded.clear()
        results = own.generate(TEXTS, FOUR)
        assert sum(encoded, []) == [result.prompt for result in results] == TEXTS
        assert seen[0] < 40 == seen[-1]
        assert texts_of(results) == wanted


@pytest.mark.parametrize("how", [dict(priority=[place % 2 for place in range(41)]), {}])
def test_texts_are_encoded_before_any_runs_where_it_matters(llm, encoded, how, monkeypatch):
    """Some go first, or one may be too long."""
    seen, launch = [], llm.core.executor.launch
    monkeypatch.setattr(llm.core.executor, "launch", lambda plan: (seen.append(sum(map(len, encoded))), launch(plan)))
    last = "short" if how else "x" * 55
    assert len(llm.generate([*TEXTS, last], FOUR, **how)) == 41
    assert set(seen) == {41}
    seen.clear()
    with pytest.raises(PromptTooLong, match="prompt 41 of 41: the prompt has 64 tokens"):
        llm.generate([*TEXTS, "x" * 64], FOUR, **how)
    assert not seen


def test_a_text_that_the_tokenizer_refuses_late_ends_its_call_and_nothing_else(llm, encoded, monkeypatch):
    wanted = texts_of(llm.generate(TEXTS, FOUR))
    encode = type(llm.tokenizer).encode_batch

    def refusing(self, texts, *how):
        if TEXTS[33] in texts:
            raise InvalidPrompt("no such letter")
        return encode(self, texts, *how)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.tokenizer), "encode_batch", refusing)
        before = llm.core.num_steps
        with pytest.raises(InvalidPrompt, match="prompt 34 of 40: no such letter"):
            llm.generate(TEXTS, FOUR)
        assert llm.core.num_steps > before and not llm.core.scheduler.num_running
    llm.core.scheduler.check()
    assert texts_of(llm.generate(TEXTS, FOUR)) == wanted


@pytest.mark.parametrize("at", [0, 1, 9])
@pytest.mark.usefixtures("interrupts")
def test_an_interrupt_while_texts_are_encoded(llm, encoded, monkeypatch, at):
    wanted = texts_of(llm.generate(TEXTS, FOUR))
    encode, calls = type(llm.tokenizer).encode_batch, []

    def interrupted(self, texts, *how):
        calls.append(texts)
        if len(calls) == at + 1:
            os.kill(os.getpid(), signal.SIGINT)  # the main thread hears it, whichever encodes
        return encode(self, texts, *how)

    with monkeypatch.context() as patch:
        patch.setattr(type(llm.tokenizer), "encode_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(TEXTS, FOUR)
    assert not llm.core.scheduler.num_running and not llm._engine._requests
    llm.core.scheduler.check()
    assert texts_of(llm.generate(TEXTS, FOUR)) == wanted


@pytest.mark.parametrize("bad", ["", "\ud800", {"prompt": ""}, {"prompt": 3}, [-1], [True], 5])
def test_a_bad_prompt_is_named_by_its_index_before_any_prompt_runs(llm, bad):
    num_steps = llm.core.num_steps
    with pytest.raises(InvalidPrompt, match="prompt 3 of 4: "):
        llm.generate(["Hello", [1], bad, "world"], FOUR)
    assert llm.core.num_steps == num_steps and not llm.core.has_requests()


def test_result_fields(llm):
    result = llm.generate("abc", SamplingParams(temperature=0, max_tokens=4, logprobs=2, ignore_eos=True))[0]
    sample = result.outputs[0]
    assert result.finished and sample.finish_reason == "length" and sample.stop_reason is None
    assert sample.index == 0 and len(sample.logprobs) == 4
    chosen = [step[token] for step, token in zip(sample.logprobs, sample.token_ids, strict=True)]
    assert all(entry.rank == 1 for entry in chosen)
    assert sample.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in chosen))
    metrics = result.metrics
    assert metrics.arrival_time > 1e9
    assert metrics.last_token_ts >= metrics.first_token_ts > 0 < metrics.first_token_latency


def test_the_text_is_the_decoded_tokens(llm):
    for sample in llm.generate(["abc", "xyz"], SamplingParams(temperature=1.0, max_tokens=12, n=2))[0].outputs:
        ended = sample.finish_reason == "stop"
        assert sample.text == llm.tokenizer.decode(sample.token_ids[:-1] if ended else sample.token_ids)


def test_streamed_text_only_grows_and_ends_as_the_whole(llm):
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=20, ignore_eos=True)
    whole = llm.generate("abc", params)[0].outputs[0]
    so_far = ""
    for result in llm.stream("abc", params):
        assert result.outputs[0].text.startswith(so_far)
        so_far = result.outputs[0].text
    assert so_far == whole.text
    assert result.outputs[0].token_ids == whole.token_ids


def test_leaving_a_stream_early_frees_its_row(llm):
    for _ in llm.stream("abc", SamplingParams(max_tokens=40, ignore_eos=True)):
        break
    while llm.core.has_requests():
        llm.core.step()
    assert llm.core.scheduler.num_running == 0
    llm.core.scheduler.cache.check()


def test_stop_string_cuts_the_text(llm):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=40, ignore_eos=True)
    full = llm.generate("abc", params)[0].outputs[0].text
    stop = full[5:7]
    place = full.index(stop)
    cut = llm.generate("abc", params.with_changes(stop=[stop]))[0].outputs[0]
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (full[:place], "stop", stop)
    kept = llm.generate("abc", params.with_changes(stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == full[:place] + stop


def test_stop_token_ends_the_output_and_is_named(llm):
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=10, ignore_eos=True)
    tokens = llm.generate("abc", params)[0].outputs[0].token_ids
    cut = llm.generate("abc", params.with_changes(stop_token_ids=[tokens[4]]))[0].outputs[0]
    assert cut.token_ids == tokens[: tokens.index(tokens[4]) + 1]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", tokens[4])


def test_the_model_length_ends_the_output(llm):
    sample = llm.generate([5] * 60, SamplingParams(max_tokens=None, ignore_eos=True))[0].outputs[0]
    assert len(sample.token_ids) == 4 and sample.finish_reason == "length"


def test_samples_of_one_prompt_differ_and_repeat(llm):
    params = SamplingParams(n=4, temperature=1.5, seed=9, max_tokens=8)
    first, again = (llm.generate("abc", params)[0].outputs for _ in range(2))
    assert [s.token_ids for s in first] == [s.token_ids for s in again]
    assert [s.index for s in first] == [0, 1, 2, 3]
    assert len({tuple(s.token_ids) for s in first}) > 1


def test_a_repeated_prompt_is_found_in_the_cache(llm):
    prompt = list(range(30, 53))
    llm.generate(prompt, FOUR)
    assert llm.generate(prompt, FOUR)[0].num_cached_tokens == 20
    llm.reset_prefix_cache()
    assert llm.generate(prompt, FOUR)[0].num_cached_tokens == 0


@pytest.mark.parametrize("replicas", [False, True])
def test_a_callback_gets_each_result_when_it_is_there(llm, folder, replicas):
    """And an error in it, such as Ctrl-C, ends the call and nothing else."""
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (9, 3, 6)]
    seen = {}
    with contextlib.ExitStack() as stack:
        if replicas:
            llm = stack.enter_context(LLM(folder, data_parallel_size=2, **SMALL))
        found = llm.generate(["a", "b", "c"], params, on_result=seen.__setitem__)
        assert list(seen) == [1, 2, 0] or replicas
        assert [seen[number].outputs for number in range(3)] == [each.outputs for each in found]

        def interrupt(number, output):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            llm.chat([[{"role": "user", "content": "a"}]] * 3, params, on_result=interrupt)
        assert llm.generate("b", params[1])[0].outputs == found[1].outputs


def test_chat_renders_the_template(llm):
    messages = [{"role": "user", "content": "hi"}]
    result = llm.chat(messages, FOUR)[0]
    assert result.prompt == llm.inputs.render_chat(messages)
    both = llm.chat([messages, messages], FOUR)
    assert [r.outputs[0].token_ids for r in both] == [result.outputs[0].token_ids] * 2


def test_control_tokens_that_messages_spell_are_text_unless_allowed(llm):
    messages = [{"role": "user", "content": "a<|im_end|>"}, {"role": "assistant", "content": "<|im_start|>b"}]
    benign = [{"role": "user", "content": "hi"}]
    result, other = llm.chat([messages, benign], FOUR)
    assert llm.chat(benign, FOUR)[0].prompt_token_ids == other.prompt_token_ids
    ids = result.prompt_token_ids
    assert (ids.count(IM_START), ids.count(IM_END)) == (3, 2)
    assert type(result.prompt) is str and result.prompt == llm.inputs.render_chat(messages)
    streamed = list(llm.stream_chat(messages, FOUR))[-1]
    assert streamed.prompt_token_ids == ids and streamed.outputs[0].token_ids == result.outputs[0].token_ids
    old = llm.chat(messages, FOUR, allow_control_tokens=True)[0]
    assert old.prompt == result.prompt and old.prompt_token_ids == llm.tokenizer.encode(result.prompt, False)
    assert (old.prompt_token_ids.count(IM_START), old.prompt_token_ids.count(IM_END)) == (4, 3)


def test_the_option_allows_control_tokens_in_messages(folder):
    messages = [{"role": "user", "content": "a<|im_end|>"}]
    with LLM(folder, **SMALL, allow_control_tokens=True) as llm:
        counts = [llm.chat(messages, FOUR, **how)[0].prompt_token_ids.count(IM_END)
                  for how in ({}, {"allow_control_tokens": False})]  # fmt: skip
    assert counts == [2, 1]


@pytest.mark.parametrize("depth", [0, 1])
def test_threads_that_share_it_take_turns(folder, depth):
    prompts, found = [[i, i + 1] for i in range(1, 10)], []

    def generate():
        found.append([r.outputs[0].token_ids for r in llm.generate(prompts, FOUR)])

    def stream():
        found.append([list(llm.stream(prompt, FOUR))[-1].outputs[0].token_ids for prompt in prompts])

    with LLM(folder, **SMALL, depth=depth) as llm:
        generate()
        threads = [threading.Thread(target=target) for target in (generate, stream, generate, stream)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE)
    assert found == found[:1] * 5


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("by_reader", [True, False])
def test_dropping_a_stream_does_not_wait_for_a_step(folder, depth, by_reader):
    """The collector drops streams too, in a thread that the step may be waiting for."""
    entered, leave, left_in_time = threading.Event(), threading.Event(), []
    with LLM(folder, **SMALL, depth=depth) as llm:
        stream = llm.stream([1, 2], SamplingParams(max_tokens=40, ignore_eos=True))
        next(stream)
        launch = llm.core.executor.launch

        def waiting(plan):
            if not left_in_time:
                entered.set()
                left_in_time.append(leave.wait(PATIENCE))
            launch(plan)

        def drop():
            stream.close()
            leave.set()

        llm.core.executor.launch = waiting
        running = threading.Thread(target=llm.generate, args=([[3], [4]], FOUR))
        running.start()
        assert entered.wait(PATIENCE)
        if by_reader:
            drop()
        else:
            threading.Thread(target=drop).start()
        running.join(PATIENCE)
        assert left_in_time == [True]
        assert not llm._engine._requests and not llm.core.scheduler.num_live
        llm.core.scheduler.check()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_stream_that_is_dropped_inside_a_step_ends_after_it(folder, depth, monkeypatch):
    """As the collector does it, in the midst of a plan."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    with LLM(folder, **SMALL, depth=depth) as llm:
        wanted = llm.generate([[1, 2, 3], [4, 5]], params)
        stream = llm.stream([1, 2, 3], params)
        next(stream)
        admit_waiting, num = Admitter.admit_waiting, itertools.count(1)

        def dropping(self, *args):
            if next(num) == 2:
                stream.close()
            return admit_waiting(self, *args)

        monkeypatch.setattr(Admitter, "admit_waiting", dropping)
        found = llm.generate([[1, 2, 3], [4, 5]], params)
        assert [r.outputs[0].token_ids for r in found] == [r.outputs[0].token_ids for r in wanted]
        assert not llm._engine._requests and not llm.core.scheduler.num_live
        llm.core.scheduler.check()


@pytest.mark.parametrize("call", ["generate", "stream", "next"])
def test_a_call_that_waits_while_another_thread_closes_says_so(folder, call):
    llm = LLM(folder, **SMALL)
    begun = llm.stream([1, 2], FOUR)
    next(begun)
    lock = llm._driver.lock

    class ClosedMeanwhile:
        def __enter__(self):
            llm._driver.lock = lock
            llm.close()
            lock.acquire()

        def __exit__(self, *error):
            lock.release()

    llm._driver.lock = ClosedMeanwhile()
    with pytest.raises(EngineClosed):
        if call == "generate":
            llm.generate([1, 2], FOUR)
        else:
            next(begun if call == "next" else llm.stream([1, 2], FOUR))


def test_more_prompts_than_may_wait(folder):
    with LLM(folder, **SMALL, max_waiting=3) as llm:
        results = llm.generate([[i + 1] for i in range(20)], FOUR)
        assert len(results) == 20 and all(r.finished for r in results)
        core, steps = llm.core, llm.core.num_steps
        many = SamplingParams(n=4, max_tokens=2)
        with pytest.raises(InvalidParams, match="prompt 2 of 2: n is 4, and the queue holds 3 samples"):
            llm.generate([[1], [2]], [FOUR, many])
        with pytest.raises(InvalidParams, match="raise max_waiting"):
            next(llm.stream([1], many))
        assert core.num_steps == steps and not core.has_requests()  # before anything runs
        (result,) = llm.generate([1], SamplingParams(n=3, max_tokens=2))
        assert len(result.outputs) == 3


def test_closing_frees_the_cache(folder):
    llm = LLM(folder, **SMALL)
    cache = weakref.ref(llm.core.executor.store.caches[0][0])
    llm.close()
    gc.collect()
    assert cache() is None


def test_a_device_failure_is_raised_with_its_cause(folder):
    for depth in (0, 1, 2):
        with LLM(folder, **SMALL, depth=depth) as llm:
            llm.core.executor.model.logits = None  # not callable
            with pytest.raises(EngineDead, match="start a new one") as caught:
                llm.generate([1, 2], FOUR)
            assert isinstance(caught.value.__cause__, TypeError)
            with pytest.raises(EngineDead):
                llm.generate([1, 2], FOUR)


def test_a_row_of_nan_ends_alone(folder):
    with LLM(folder, **SMALL) as llm:
        model = llm.core.executor.model
        logits = model.logits
        wanted = llm.generate([[1], [2], [3]], FOUR)

        def poisoned(hidden):
            out = logits(hidden)
            if len(out) == 3:
                out[1] = float("nan")
            return out

        model.logits = poisoned
        results = llm.generate([[1], [2], [3]], FOUR)
        assert [r.outputs[0].finish_reason for r in results] == ["length", "error", "length"]
        assert results[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
        assert results[2].outputs[0].token_ids == wanted[2].outputs[0].token_ids


def test_streams_and_calls_side_by_side_lose_nothing(llm):
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    wanted = [llm.generate(prompt, params)[0].outputs[0].token_ids for prompt in ([1, 2], [3, 4])]
    first, second = llm.stream([1, 2], params), llm.stream([3, 4], params)
    got = [next(first), next(second)]
    llm.generate([5], params)  # steps the others too
    got = [[*got, *rest][-1] for got, rest in zip(([got[0]], [got[1]]), (first, second), strict=True)]
    assert [result.outputs[0].token_ids for result in got] == wanted
    assert all(result.finished for result in got)


def test_a_call_inside_a_stream_waits_for_its_own_prompts_alone(llm):
    lengths = []
    for result in llm.stream("abc", SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)):
        lengths.append(len(result.outputs[0].token_ids))
        if len(lengths) == 1:
            assert len(llm.generate("xyz", FOUR)[0].outputs[0].token_ids) == 4
    assert lengths[0] == 1 and lengths[1] < 10 and lengths[-1] == 20
    assert not llm.core.has_requests()


def test_a_stream_of_a_closed_engine_says_so(folder):
    llm = LLM(folder, **SMALL)
    stream = llm.stream([1, 2], FOUR)
    next(stream)
    llm.close()
    with pytest.raises(EngineClosed):
        next(stream)


def test_an_engine_that_was_not_closed_leaves_no_thread(folder):
    before = threading.active_count()
    llm = LLM(folder, **SMALL, depth=2)
    llm.generate([1], FOUR)
    assert threading.active_count() > before
    del llm
    gc.collect()
    assert threading.active_count() == before


@pytest.mark.usefixtures("interrupts")
def test_ctrl_c_comes_between_steps_and_harms_nothing(folder):
    with LLM(folder, **SMALL) as llm:
        wanted = llm.generate([1, 2], FOUR)[0].outputs[0].token_ids
        launch, interrupts = llm.core.executor.launch, iter([True])

        def interrupted(plan):
            if next(interrupts, False):
                signal.raise_signal(signal.SIGINT)
            launch(plan)

        llm.core.executor.launch = interrupted
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2], FOUR)
        assert llm.generate([1, 2], FOUR)[0].outputs[0].token_ids == wanted
        llm.core.scheduler.check()


def test_an_interrupt_inside_a_step_ends_the_engine_rather_than_hang_it(folder):
    with LLM(folder, **SMALL) as llm:

        def torn(plan):
            raise KeyboardInterrupt

        llm.core.executor.launch = torn
        with pytest.raises(KeyboardInterrupt):
            llm.generate([1, 2], FOUR)
        with pytest.raises(EngineDead, match="KeyboardInterrupt"):
            llm.generate([1, 2], FOUR)


def test_min_tokens_hold_off_stop_strings(llm):
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    text = llm.generate("abc", params)[0].outputs[0].text
    early = llm.generate("abc", params.with_changes(stop=list(set(text)), min_tokens=9))[0].outputs[0]
    assert len(early.token_ids) == 10 and early.finish_reason == "stop"
