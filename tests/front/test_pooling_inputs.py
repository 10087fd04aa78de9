"""Prompts for pooling, without an engine: what is sent, and what is refused and how."""

import random
import threading
from array import array

import msgspec
import numpy as np
import pytest
import torch

from patience import PATIENCE
from scripted_core import facts
from slipstream.base.errors import InvalidParams, InvalidPrompt, PromptTooLong, SlipstreamError
from slipstream.checkpoint.pooling_info import PoolingInfo, Role
from slipstream.contracts.messages import Output, Pooled
from slipstream.contracts.request import FinishReason
from slipstream.front.pooling_calls import encode, rerank, score
from slipstream.front.pooling_inputs import PoolingInputs, PoolingPrompts
from slipstream.front.pooling_prompts import PoolingBatch
from slipstream.front.pooling_results import EmbeddingOutput, PoolingRequestOutput
from slipstream.front.prompts import as_batch
from slipstream.front.request_state import PoolingRequestState
from slipstream.params.pooling import PoolingParams
from slipstream.text.tokenizer import Tokenizer
from tiny_encoder import CLS, SEP, pair_tokenizer
from tiny_tokenizer import IM_END, IM_START, byte_tokenizer

EMBEDDER = PoolingInfo(
    tasks=("embed", "token_embed"),
    methods=("mean",),
    is_causal=False,
    embed_size=8,
    token_size=8,
    has_types=True,
    types_pairs=True,
)
CROSS = PoolingInfo(
    tasks=("classify",),
    methods=("first",),
    is_causal=False,
    embed_size=8,
    token_size=8,
    num_labels=1,
    labels=("x",),
    has_types=True,
    types_pairs=True,
)
LATE = PoolingInfo(
    tasks=("token_embed",), methods=("all",), is_causal=False, embed_size=8, token_size=8, late_interaction=True
)
EMBED = PoolingParams(task="embed")


def inputs(pooling=EMBEDDER, tokenizer=True, length=64, **own):
    pooling = msgspec.structs.replace(pooling, **own)
    backend = Tokenizer(pair_tokenizer()) if tokenizer else None
    return PoolingInputs(facts("nowhere", pooling=pooling, max_model_len=length, max_positions=length), backend)


def prepared(given, prompts, params=EMBED, **how):
    """What is sent, in the order of the prompts."""
    return sorted(given.prepare([PoolingBatch(prompts, params, **how)]), key=lambda one: one.index)


def ids_of(text):
    return [CLS, *pair_tokenizer().encode(text, add_special_tokens=False).ids, SEP]


def test_every_kind_of_prompt():
    prompts = [
        "ab", [1, 2, 3], (5, 6, 7), array("i", [4, 5]), np.array([7, 8]), {"prompt": "cd"},
        {"prompt_token_ids": [9, 10, 11], "token_type_ids": [0, 1, 1]}, ("a", "b"),
    ]  # fmt: skip
    found = prepared(inputs(), prompts)
    texts = [ids_of("ab"), [1, 2, 3], [5, 6, 7], [4, 5], [7, 8], ids_of("cd"), [9, 10, 11]]
    assert [list(one.ids) for one in found[:7]] == texts
    assert list(found[7].ids) == [*ids_of("a"), *ids_of("b")[1:]]
    assert [one.type_start for one in found] == [None] * 6 + [1, 3]
    assert [one.text for one in found] == ["ab", None, None, None, None, "cd", None, None]


def test_shorter_ones_are_sent_first_and_results_come_in_order():
    rng = random.Random(0)
    prompts = [[1] * rng.randrange(1, 60) for _ in range(300)]
    found = list(inputs().prepare([PoolingBatch(prompts, EMBED)]))
    assert sorted(one.index for one in found) == list(range(300))
    assert all(len(one.ids) == len(prompts[one.index]) for one in found)
    first = [len(one.ids) for one in found[:64]]
    assert first == sorted(first)


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], InvalidPrompt, "no tokens"),
        ([1, 304], InvalidPrompt, "token id 304 is out of vocabulary; tiny has 0 to 303"),
        ([1, -1], InvalidPrompt, "token id -1"),
        ([1, 2.5], InvalidPrompt, "not a list of integers"),
        ([2**40], InvalidPrompt, "a number above 2\\*\\*31"),
        (["a", 1], InvalidPrompt, "not a list of integers"),
        ([np.array([1, 2])], InvalidPrompt, "not a list of integers"),
        ([torch.tensor([1.5])], InvalidPrompt, "not a list of integers"),
        (3.5, InvalidPrompt, "this is float"),
        ({"text": "a"}, InvalidPrompt, "prompt or prompt_token_ids"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [1, 0]}, InvalidPrompt, "zeros first and then ones"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [0]}, InvalidPrompt, "must be 2 numbers"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [0, 2]}, InvalidPrompt, "zeros first"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": [[0, 1]]}, InvalidPrompt, "must be 2 numbers"),
        ({"prompt_token_ids": [1, 2], "token_type_ids": 1}, InvalidPrompt, "must be 2 numbers"),
        (("a", 5), InvalidPrompt, "a pair has two texts, and one of these is int"),
        ((5, "a"), InvalidPrompt, "a pair has two texts, and one of these is int"),
        ([1] * 65, PromptTooLong, "65 tokens, and tiny's maximum context length is 64. Please reduce the length of"),
        ("a" * 63, PromptTooLong, "the prompt has 65 tokens"),
    ],
)
def test_bad_prompts_are_named(prompt, error, words):
    with pytest.raises(error, match=words):
        prepared(inputs(), [prompt])
    with pytest.raises(error, match=words):  # and which of many
        prepared(inputs(), [[1], prompt, [2]])


def test_types_are_cut_with_their_tokens():
    pair = {"prompt_token_ids": [1, 2, 3, 4], "token_type_ids": [0, 0, 1, 1]}
    for keep, start in ((3, 2), (2, None), (-1, 2)):
        (found,) = prepared(inputs(), [pair], EMBED.with_changes(truncate_prompt_tokens=keep))
        assert (len(found.ids), found.type_start) == (keep if keep > 0 else 4, start)
    for keep, start in ((3, 1), (2, 0), (1, 0), (-1, 2)):
        (found,) = prepared(inputs(), [pair], EMBED.with_changes(truncate_prompt_tokens=keep, truncation_side="left"))
        assert (found.ids.tolist(), found.type_start) == ([1, 2, 3, 4][-keep if keep > 0 else 0 :], start)
    (found,) = prepared(inputs(), [{"prompt_token_ids": [1, 2], "token_type_ids": [1, 1]}])
    assert found.type_start == 0
    with pytest.raises(InvalidPrompt, match="token_type_ids is given with a text"):
        prepared(inputs(), [{"prompt": "ab", "token_type_ids": [0, 0, 1, 1]}])
    with pytest.raises(InvalidPrompt, match="has one token type only"):
        prepared(inputs(has_types=False), [pair])
    (found,) = prepared(inputs(has_types=False), [{"prompt_token_ids": [1], "token_type_ids": np.zeros(1, int)}])
    assert found.type_start is None


def test_queries_are_filled_up():
    role = Role(token_id=9, length=8, filler_id=4, filled=8, filler_is_seen=False)
    short, long = prepared(inputs(), ["ab", "abcdefghij"], role=role)
    assert list(short.ids) == [CLS, 9, *ids_of("ab")[1:], 4, 4, 4] and short.num_seen == 5
    assert list(long.ids) == [CLS, 9, *ids_of("abcde")[1:]] and long.num_seen is None
    (seen,) = prepared(inputs(), ["ab"], role=Role(filler_id=4, filled=6))
    assert list(seen.ids) == [*ids_of("ab"), 4, 4] and seen.num_seen is None


def test_errors_name_the_prompt_by_its_index():
    with pytest.raises(InvalidPrompt, match="prompt 71 of 72: the prompt has no tokens"):
        prepared(inputs(), ["a"] * 70 + [[], "b"])


def test_an_empty_text_is_what_the_tokenizer_makes_of_it():
    empty, space, pair = prepared(inputs(), ["", " \n", ("", "b")])
    assert list(empty.ids) == [CLS, SEP] and list(space.ids) == ids_of(" \n")
    assert list(pair.ids) == [CLS, SEP, *ids_of("b")[1:]]
    assert inputs().text_ids("", EMBED) == [CLS, SEP]
    bare = PoolingInputs(facts("nowhere", pooling=EMBEDDER), Tokenizer(byte_tokenizer()))
    with pytest.raises(
        InvalidPrompt, match="prompt 2 of 3: the prompt has no tokens, and the tokenizer of tiny adds none"
    ):
        prepared(bare, ["a", "", "b"])


def test_exactly_the_models_length_is_taken():
    assert len(prepared(inputs(), [[1] * 64])[0].ids) == 64


def test_texts_without_a_tokenizer():
    with pytest.raises(InvalidPrompt, match="skip_tokenizer_init"):
        prepared(inputs(tokenizer=False), ["a"])
    assert list(prepared(inputs(tokenizer=False), [[1, 2]])[0].ids) == [1, 2]


def test_texts_are_cut_as_asked_then_as_the_folder_says():
    text = "abcdefghij" * 20
    assert list(prepared(inputs(max_seq_length=6), [text])[0].ids) == [CLS, *ids_of("abcd")[1:-1], SEP]
    asked = PoolingParams(task="embed", truncate_prompt_tokens=4)
    assert list(prepared(inputs(max_seq_length=6), [text], asked)[0].ids) == ids_of("ab")
    whole = PoolingParams(task="embed", truncate_prompt_tokens=-1)
    assert len(prepared(inputs(max_seq_length=6), [text], whole)[0].ids) == 64
    assert list(prepared(inputs(), [[1, 2, 3, 4, 5]], asked)[0].ids) == [1, 2, 3, 4]


def test_a_named_prompt_is_put_before_texts():
    given = inputs(prompts={"query": "Q:", "document": ""}, default_prompt_name="query")
    assert given.prefix(None) == "Q:" and given.prefix("document") == "" and given.prefix(None, "X:") == "X:"
    assert list(prepared(given, ["a"], prefix=given.prefix("query"))[0].ids) == ids_of("Q:a")
    assert prepared(given, ["a"], prefix="Q:")[0].text == "a"
    with pytest.raises(InvalidParams, match="no prompt 'passage'; it has query, document"):
        given.prefix("passage")
    with pytest.raises(InvalidParams, match="remove one of them"):
        given.prefix("query", "X:")


MARKED = Role(token_id=9)


def test_lower_case_and_markers():
    assert list(prepared(inputs(lower_case=True), ["AB"])[0].ids) == ids_of("ab")
    assert list(prepared(inputs(), ["ab"], role=MARKED)[0].ids) == [CLS, 9, *ids_of("ab")[1:]]
    cut = PoolingParams(task="token_embed", truncate_prompt_tokens=4)
    assert list(prepared(inputs(), ["abcd"], cut, role=MARKED)[0].ids) == [CLS, 9, *ids_of("a")[1:]]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (PoolingParams(task="classify"), "tiny does not do classify; it does embed, token_embed"),
        (PoolingParams(dimensions=9), "dimensions is 9; vectors of tiny have 8"),
        (PoolingParams(dimensions=5), "was trained for 2, 4"),
        (PoolingParams(step_tag_id=3), "step_tag_id and returned_token_ids are for token_classify"),
        (PoolingParams(truncate_prompt_tokens=65), "truncate_prompt_tokens is 65, tiny takes 64"),
        ("embed", "pooling_params is str"),
    ],
)
def test_parameters_that_the_model_does_not_support(params, words):
    with pytest.raises(InvalidParams, match=words):
        inputs(matryoshka=(2, 4)).resolve(params)


def test_normalize_is_for_vector_tasks():
    for task, pooling in (("classify", CROSS), ("sparse", msgspec.structs.replace(EMBEDDER, tasks=("sparse",)))):
        with pytest.raises(InvalidParams, match=f"normalize is True and the task {task}, which has no vectors"):
            inputs(pooling).resolve(PoolingParams(normalize=True), None)
        assert inputs(pooling).resolve(PoolingParams(), None).task == task
    assert inputs().resolve(PoolingParams(normalize=False), "token_embed").normalize is False


def test_dimensions_are_for_vector_tasks():
    with pytest.raises(InvalidParams, match="the task classify, which has no vectors"):
        inputs(CROSS).resolve(PoolingParams(dimensions=1))
    with pytest.raises(InvalidParams, match="not trained for shorter vectors"):
        inputs(matryoshka=None).resolve(PoolingParams(dimensions=4))
    assert inputs(matryoshka=(4,)).resolve(PoolingParams(dimensions=4)).dimensions == 4


def test_the_task_of_the_call_and_of_the_parameters():
    assert inputs().resolve(None).task == "embed"
    assert inputs().resolve(PoolingParams(), "token_embed").task == "token_embed"
    with pytest.raises(InvalidParams, match="has the task embed and the call token_embed"):
        inputs().resolve(PoolingParams(task="embed"), "token_embed")


def test_lists_of_parameters_must_match():
    with pytest.raises(InvalidParams, match="2 prompts and 1 pooling_params"):
        next(encode(inputs(), ["a", "b"], [PoolingParams()]))


def test_one_prompt_or_many():
    assert as_batch("a") == ["a"] and as_batch([1, 2]) == [[1, 2]] and as_batch(["a", [1]]) == ["a", [1]]
    assert len(as_batch(np.zeros((3, 2), np.int64))) == 3 and len(as_batch(np.zeros(3, np.int64))) == 1
    assert as_batch([np.int64(1), np.int64(2)]) == [[1, 2]] and len(as_batch(np.array(3))) == 1
    with pytest.raises(InvalidPrompt, match="prompts is int"):
        as_batch(3)


def test_equal_prompts_are_sent_once():
    batch = PoolingBatch(["a", "b", "a", [CLS, 7], "a"], EMBED)
    feed = PoolingPrompts(inputs(), [batch], iter(map(str, range(99))).__next__)
    sent = list(feed)
    assert len(sent) == 3 and feed.total == 5
    results = [PoolingRequestOutput(message.request_id, None, message.prompt_token_ids, text) for message, text in sent]
    found = feed.in_order(results)
    assert [list(one.ids) for one in found] == [ids_of("a"), ids_of("b"), ids_of("a"), [CLS, 7], ids_of("a")]


def test_equal_tokens_are_not_equal_prompts_when_anything_else_differs():
    ids = [CLS, 5, SEP, 6, SEP]
    pairs = [{"prompt_token_ids": ids, "token_type_ids": [0] * (5 - n) + [1] * n} for n in (2, 1, 0, 2)]
    each = [EMBED, EMBED.with_changes(dimensions=4), EMBED.with_changes(normalize=False), EMBED]
    for batch in (PoolingBatch(pairs, EMBED), PoolingBatch([ids] * 4, each)):
        feed = PoolingPrompts(inputs(), [batch], iter(map(str, range(99))).__next__)
        sent = [message for message, _ in feed]
        assert len(sent) == 3 == len({(message.type_start, message.params) for message in sent})


def test_texts_with_equal_tokens_keep_their_own_text():
    feed = PoolingPrompts(
        inputs(lower_case=True), [PoolingBatch(["Ab", "aB", "c"], EMBED)], iter(map(str, range(99))).__next__
    )
    states = [PoolingRequestState(message, text, EMBEDDER) for message, text in feed]
    for state in states:
        pooled = Pooled.of(np.ones(4, np.float32))
        state.take(Output(state.id, 0, [], finish_reason=FinishReason.STOP, pooled=pooled), 0.0)
    assert len(states) == 2
    assert [one.prompt for one in feed.in_order([state.result() for state in states])] == ["Ab", "aB", "c"]


@pytest.mark.parametrize("num", [5, 65])
def test_between_a_query_and_its_documents_it_is_ready_when_they_are(num):
    given, go_on = inputs(), threading.Event()
    encode_texts = given._encode

    def slow(texts, *how):
        if len(texts) > 1 and num > 64:
            assert go_on.wait(PATIENCE)
        return encode_texts(texts, *how)

    given._encode = slow
    batches = [PoolingBatch(["q"], EMBED), PoolingBatch([f"d{place}" for place in range(num)], EMBED)]
    feed = PoolingPrompts(given, batches, iter(map(str, range(99))).__next__)
    sent = iter(feed)
    assert next(sent)[1] == "q" and not feed.is_ready()
    go_on.set()
    assert next(sent)[1] == "d0" and feed.is_ready()
    assert len(list(sent)) == num - 1 and feed.is_ready()


def test_plain_lists_for_another_process():
    ((message, _),) = PoolingPrompts(inputs(), [PoolingBatch(["a"], EMBED)], lambda: "x", as_lists=True)
    assert type(message.prompt_token_ids) is list


# Verbs


def test_pairs_that_do_not_match():
    with pytest.raises(InvalidParams, match="2 first texts and 3 second ones"):
        next(score(inputs(), ["a", "b"], ["c", "d", "e"]))
    for bad in ([], 3, [3]):
        with pytest.raises(InvalidPrompt, match="second texts"):
            next(score(inputs(), "a", bad))


def test_a_cross_encoder_reads_pairs():
    (batch,) = next(score(inputs(CROSS), "q", ["a", "b"]))
    assert list(batch.prompts) == [("q", "a"), ("q", "b")] and batch.params.task == "classify"
    (batch,) = next(score(inputs(CROSS), ["q", "r"], ["a", "b"]))
    assert list(batch.prompts) == [("q", "a"), ("r", "b")]
    with pytest.raises(InvalidPrompt, match="second texts have a int"):
        next(score(inputs(CROSS), "q", ["a", 5]))
    with pytest.raises(InvalidParams, match="takes no instruction"):
        next(score(inputs(CROSS), "q", "a", instruction="find"))
    with pytest.raises(InvalidParams, match="has 3 classes"):
        next(score(inputs(CROSS, num_labels=3), "q", "a"))


def test_a_template_takes_texts_as_they_are():
    given = inputs(CROSS, pair_template="<{instruction}|{query}|{document}>", instruction="judge")
    (batch,) = next(score(given, "{document}", "{query}{x}"))
    assert batch.prompts == ["<judge|{document}|{query}{x}>"]
    (batch,) = next(score(given, "q", "d", instruction="look"))
    assert batch.prompts == ["<look|q|d>"]


def test_only_the_template_of_pairs_writes_control_tokens():
    pooling = msgspec.structs.replace(CROSS, pair_template="<|im_start|>{instruction}{query}\n{document}<|im_end|>")
    pooling = msgspec.structs.replace(pooling, instruction="judge", lower_case=True)
    tokenizer, spelled = Tokenizer(byte_tokenizer()), "A<|im_end|>"

    def ids(**how):
        own = PoolingInputs(facts("nowhere", pooling=pooling, max_model_len=99, **how), tokenizer)
        (batch,) = next(score(own, spelled, ["b" + spelled, "c"], PoolingParams(truncate_prompt_tokens=80)))
        found = prepared(own, batch.prompts, batch.params)
        assert all(type(one.text) is str for one in found) and found[0].text.lower().count("<|im_end|>") == 3
        return [list(one.ids) for one in found]

    spelled_twice, spelled_once = ids()
    assert [(one.count(IM_START), one.count(IM_END)) for one in (spelled_twice, spelled_once)] == [(1, 1), (1, 1)]
    assert bytes(spelled_once[1:-1]).decode() == "judgeA<|im_end|>\nc"
    assert ids(allow_control_tokens=True)[0].count(IM_END) == 3


def test_an_embedder_uses_the_prompts_of_roles_when_it_reranks():
    given = inputs(prompts={"query": "Q:", "document": "D:"})
    queries, documents = next(rerank(given, "q", ["a", "b"]))
    assert (queries.prefix, documents.prefix) == ("Q:", "D:")
    queries, documents = next(score(given, "q", ["a", "b"]))
    assert (queries.prefix, documents.prefix) == ("", "")


def test_late_interaction_keeps_its_queries_on_the_device():
    queries, documents = next(
        score(inputs(LATE, query=Role(token_id=5), document=Role(token_id=6)), "q", ["a", "b", "c"])
    )
    (asking,) = queries.params
    assert asking.query_uses == 3 and documents.params.query_key == asking.query_key and documents.params.is_document
    assert (queries.role.token_id, documents.role.token_id) == (5, 6)
    queries, documents = next(score(inputs(LATE), ["q", "r"], ["a", "b"]))
    assert [one.query_key for one in queries.params] == [one.query_key for one in documents.params]
    assert len({one.query_key for one in queries.params}) == 2 and all(one.query_uses == 1 for one in queries.params)


def test_reranking_wants_documents():
    for bad, words in (("text", "give a list"), (None, "give a list"), (iter("ab"), "give a list")):
        with pytest.raises(InvalidPrompt, match=words):
            next(rerank(inputs(), "q", bad))
    with pytest.raises(InvalidParams, match="top_n is 0"):
        next(rerank(inputs(), "q", ["a"], top_n=0))
    with pytest.raises(StopIteration) as end:
        next(rerank(inputs(), "q", []))
    assert end.value.value == []


def test_a_missing_result_fails_only_its_own_pairs():
    def one(*numbers):
        if not numbers:
            return PoolingRequestOutput("x", None, [1], error="not made of numbers")
        return PoolingRequestOutput("x", EmbeddingOutput(np.array(numbers, np.float32)), [1])

    def scores(first, second, *found):
        call = score(inputs(), first, second)
        next(call)
        with pytest.raises(StopIteration) as end:
            call.send(list(found))
        return [pair.error or pair.outputs.score for pair in end.value.value]

    good, other, bad = one(3, 4), one(4, -3), one()
    assert scores("q", ["a", "b", "c"], good, good, bad, other) == [1.0, "not made of numbers", 0.0]
    assert scores("q", ["a", "b"], bad, good, good) == ["not made of numbers"] * 2
    assert scores(["q", "r"], ["a", "b"], bad, good, good, good) == ["not made of numbers", 1.0]
    call = rerank(inputs(), "q", ["a", "b"])
    next(call)
    with pytest.raises(SlipstreamError, match="document 2 of 2: not made of numbers"):
        call.send([good, good, bad])


def test_the_end_that_is_cut_may_be_chosen_or_none_at_all():
    text = "abcdefgh"
    whole = ids_of(text)
    kept = {
        side: prepared(inputs(), [text, whole], EMBED.with_changes(truncate_prompt_tokens=5, truncation_side=side))
        for side in ("left", "right", "never")
    }
    assert list(kept["right"][0].ids) == [*whole[:4], SEP] and list(kept["left"][0].ids) == [CLS, *whole[-4:]]
    assert list(kept["right"][1].ids) == whole[:5] and list(kept["left"][1].ids) == whole[-5:]
    assert [list(one.ids) for one in kept["never"]] == [whole, whole]
    never = EMBED.with_changes(truncation_side="never")
    with pytest.raises(PromptTooLong, match="has 10 tokens, tiny reads 6 of a text"):
        prepared(inputs(max_seq_length=6), [text], never)
    with pytest.raises(PromptTooLong, match="length is 6"):
        prepared(inputs(length=6), [text], never)


@pytest.mark.parametrize("facts", [{}, {"max_seq_length": 6}, {"lower_case": True}])
@pytest.mark.parametrize("how", [{}, {"truncate_prompt_tokens": 4}, {"truncation_side": "left"}])
def test_one_text_by_itself_has_the_ids_it_has_among_others(facts, how):
    given, params = inputs(**facts), EMBED.with_changes(**how)
    for text in ("a", "ABcd efgh", "é" * 20, "", " \n"):
        for prefix in ("", "query: "):
            (one,) = prepared(given, [text], params, prefix=prefix)
            assert given.text_ids(text, params, prefix) == list(one.ids)
    if not facts.get("max_seq_length") and not how.get("truncate_prompt_tokens"):
        with pytest.raises(PromptTooLong):
            given.text_ids("x" * 99, params)
