"""Pooling from outside: LLM and AsyncEngine on tiny checkpoints, against transformers on the same weights."""

import asyncio
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import slipstream
from slipstream import AsyncEngine
from slipstream.base.errors import (
    InvalidOption,
    InvalidParams,
    InvalidPrompt,
    PromptTooLong,
    RequestTooLarge,
    SlipstreamError,
)
from slipstream.front import async_engine
from slipstream.params.pooling import PoolingParams
from tiny import write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

transformers = pytest.importorskip("transformers")

TEXTS = ["a", "the cat sat on the mat", "rain", "where is the station, please?", "it rains in the mountains today"]


def LLM(model, **options):
    """On the CPU unless a test says otherwise: there numbers are float32."""
    return slipstream.LLM(model, **({"device": "cpu"} | options))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pooling")
    write_modules(write_tiny_encoder(root / "embedder"), "mean", dense=((48, 20, "Tanh"),))
    write_tiny_encoder(root / "cross", task="ForSequenceClassification", num_labels=1)
    write_tiny_encoder(root / "classes", task="ForSequenceClassification", num_labels=3,
                       id2label={0: "bad", 1: "so so", 2: "good"})  # fmt: skip
    write_tiny_encoder(root / "tokens", task="ForTokenClassification", num_labels=4)
    write_tiny_encoder(root / "splade", task="ForMaskedLM")
    write_tiny(root / "decoder", "qwen3")
    return root


@pytest.fixture(scope="module")
def embedder(folders):
    with LLM(str(folders / "embedder"), num_threads=1, use_tqdm_on_load=False) as llm:
        yield llm


@pytest.fixture(scope="module")
def cross(folders):
    with LLM(str(folders / "cross"), use_tqdm_on_load=False) as llm:
        yield llm


def oracle(folder, kind, texts, pairs=None):
    """transformers' own outputs, one text at a time, so that nothing is padded."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        for place, text in enumerate(texts):
            pair = pairs[place] if pairs else None
            yield model(**tokenizer(text, pair, return_tensors="pt", return_token_type_ids=True))


def expected_vectors(folder):
    from safetensors.torch import load_file

    dense = load_file(folder / "2_Dense" / "model.safetensors")
    found = []
    for out in oracle(folder, "AutoModel", TEXTS):
        mean = out.last_hidden_state[0].mean(0)
        vector = torch.tanh(dense["linear.weight"] @ mean + dense["linear.bias"])
        found.append((vector / vector.norm()).numpy())
    return np.stack(found)


def test_vectors_of_a_sentence_transformers_folder(embedder, folders):
    found = embedder.embed(TEXTS)
    expected = expected_vectors(folders / "embedder")
    np.testing.assert_allclose(np.stack([one.outputs.data for one in found]), expected, atol=1e-5)
    assert len(found[0].outputs.embedding) == found[0].outputs.hidden_size == 20
    assert found[1].prompt == TEXTS[1] and found[1].prompt_token_ids[0] != found[1].prompt_token_ids[-1]


@pytest.mark.cuda
def test_on_a_gpu_float32_encoders_run_in_float16_and_stay_near(folders, embedder):
    with LLM(str(folders / "embedder"), device="cuda", max_num_seqs=8, use_tqdm_on_load=False) as llm:
        assert llm.config.model.dtype == "float16"
        for _ in range(3):  # launched, captured, replayed
            found = np.stack([one.outputs.data for one in llm.embed(TEXTS)]).astype(np.float64)
            near = np.stack([one.outputs.data for one in embedder.embed(TEXTS)]).astype(np.float64)
            assert (1 - (found * near).sum(1)).max() < 1e-3


def test_one_text_or_its_tokens_are_the_same(embedder):
    alone = embedder.embed(TEXTS[1])[0]
    by_ids = embedder.embed([alone.prompt_token_ids])[0]
    batched = embedder.embed(TEXTS)[1]
    np.testing.assert_array_equal(alone.outputs.data, by_ids.outputs.data)
    np.testing.assert_allclose(alone.outputs.data, batched.outputs.data, atol=1e-6)


def test_equal_texts_are_computed_once(embedder):
    before = embedder.core.num_steps
    found = embedder.embed(["rain"] * 100)
    assert embedder.core.num_steps == before + 1
    assert len(found) == 100 and all(one.outputs.data is found[0].outputs.data for one in found)


def test_vectors_are_cut_before_they_are_normalised(embedder):
    whole = embedder.embed(TEXTS[1], PoolingParams(normalize=False))[0].outputs.data
    cut = embedder.embed(TEXTS[1], PoolingParams(dimensions=7))[0].outputs.data
    np.testing.assert_allclose(cut, whole[:7] / np.linalg.norm(whole[:7]), atol=1e-6)


def test_vectors_are_compared_by_their_cosine(embedder, folders):
    a = expected_vectors(folders / "embedder")
    scores = [one.outputs.score for one in embedder.score(TEXTS[0], TEXTS[1:])]
    np.testing.assert_allclose(scores, a[1:] @ a[0], atol=1e-5)
    each = [one.outputs.score for one in embedder.score(TEXTS[:2], TEXTS[2:4])]
    np.testing.assert_allclose(each, [a[0] @ a[2], a[1] @ a[3]], atol=1e-5)
    ranked = embedder.rerank(TEXTS[0], TEXTS[1:], top_n=2)
    best = np.argsort(-(a[1:] @ a[0]), kind="stable")[:2]
    assert [one.index for one in ranked] == best.tolist() and ranked[0].document == TEXTS[1 + best[0]]


def test_a_cross_encoder_scores_pairs_as_transformers_does(cross, folders):
    pairs = ["of cats", "weather", "a much longer document about the station and how to get there"]
    outs = oracle(folders / "cross", "AutoModelForSequenceClassification", ["query"] * 3, pairs)
    logits = [float(out.logits[0, 0]) for out in outs]
    scores = [one.outputs.score for one in cross.score("query", pairs)]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)
    raw = [one.outputs.score for one in cross.score("query", pairs, PoolingParams(activation=False))]
    np.testing.assert_allclose(raw, logits, atol=1e-4)
    assert [one.index for one in cross.rerank("query", pairs)] == np.argsort(logits)[::-1].tolist()


def test_classes_have_names_and_probabilities(folders):
    with LLM(str(folders / "classes"), use_tqdm_on_load=False) as llm:
        found = llm.classify([TEXTS[1], ("a pair", "of texts")])
        kind, pairs = "AutoModelForSequenceClassification", [None, "of texts"]
        outs = oracle(folders / "classes", kind, [TEXTS[1], "a pair"], pairs)
        expected = [out.logits[0].softmax(0).numpy() for out in outs]
        np.testing.assert_allclose([one.outputs.probs for one in found], expected, atol=1e-5)
        assert found[0].outputs.label == ("bad", "so so", "good")[int(expected[0].argmax())]
        assert found[0].outputs.num_classes == 3
        with pytest.raises(InvalidParams, match="3 classes"):
            llm.score("a", "b")


def test_a_class_for_each_token(folders):
    with LLM(str(folders / "tokens"), use_tqdm_on_load=False) as llm:
        found = llm.encode(TEXTS[:3], pooling_task="token_classify")
        for one, out in zip(found, oracle(folders / "tokens", "AutoModelForTokenClassification", TEXTS), strict=False):
            np.testing.assert_allclose(one.outputs.data, out.logits[0].softmax(-1).numpy(), atol=1e-5)


def test_weights_of_words(folders):
    with LLM(str(folders / "splade"), use_tqdm_on_load=False) as llm:
        (found,) = llm.encode(TEXTS[1])
        (out,) = oracle(folders / "splade", "AutoModelForMaskedLM", TEXTS[1:2])
        expected = torch.log1p(out.logits[0].relu()).amax(0)
        assert set(found.outputs.weights) == set(expected.nonzero().flatten().tolist())
        np.testing.assert_allclose(found.outputs.data, expected[expected > 0].numpy(), atol=1e-4)


def test_bge_m3_weighs_words_and_has_token_vectors(tmp_path):
    write_modules(write_tiny_encoder(tmp_path, "xlm-roberta"), "cls")
    generator = torch.Generator().manual_seed(1)
    word = {"weight": torch.randn(1, 48, generator=generator), "bias": torch.full((1,), 3.0)}
    token = {"weight": torch.randn(48, 48, generator=generator), "bias": torch.randn(48, generator=generator)}
    torch.save(word, tmp_path / "sparse_linear.pt")
    torch.save(token, tmp_path / "colbert_linear.pt")
    (out,) = oracle(tmp_path, "AutoModel", TEXTS[1:2])
    hidden = out.last_hidden_state[0]
    with LLM(str(tmp_path), use_tqdm_on_load=False) as llm:
        (words,) = llm.encode(TEXTS[1], pooling_task="sparse")
        (vectors,) = llm.encode(TEXTS[1], pooling_task="token_embed")
        expected: dict[int, float] = {}
        weights = torch.relu(hidden @ word["weight"][0] + word["bias"]).tolist()
        for one, weight in zip(words.prompt_token_ids[1:-1], weights[1:-1], strict=True):
            if weight > 0:
                expected[one] = max(expected.get(one, 0.0), weight)
        assert len(expected) > 3 and words.outputs.weights == pytest.approx(expected, abs=1e-4)
        lines = hidden @ token["weight"].T + token["bias"]
        np.testing.assert_allclose(vectors.outputs.data, lines / lines.norm(dim=1, keepdim=True), atol=1e-5)
        assert llm.embed(TEXTS[1])[0].outputs.data.shape == (48,)


def test_a_language_model_generates_and_embeds(folders):
    from slipstream import SamplingParams

    with LLM(str(folders / "decoder"), use_tqdm_on_load=False, num_pages=64, max_model_len=256) as llm:
        params = SamplingParams(max_tokens=5, temperature=0)
        before = llm.generate(TEXTS[1], params)[0].outputs[0].token_ids
        stream = llm.stream(TEXTS[1], params)
        next(stream)
        vector = llm.embed(TEXTS[1])[0].outputs.data  # beside a text that is being written
        assert list(stream)[-1].outputs[0].token_ids == before
        tokenizer = transformers.AutoTokenizer.from_pretrained(folders / "decoder")
        model = transformers.AutoModel.from_pretrained(folders / "decoder").eval()
        with torch.no_grad():
            last = model(**tokenizer(TEXTS[1], return_tensors="pt")).last_hidden_state[0, -1]
        np.testing.assert_allclose(vector, (last / last.norm()).numpy(), atol=1e-5)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_yes_and_no_of_a_reranker(tmp_path, num_ranks):
    write_tiny(tmp_path, "qwen3")
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())
    vocabulary = tokens["model"]["vocab"]
    free = list(range(300, 304))
    vocabulary["yes"], vocabulary["no"] = free[0], free[1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokens))
    options = dict(use_tqdm_on_load=False, num_pages=128, max_model_len=1024, num_threads=1)
    with LLM(str(tmp_path), task="rerank", tensor_parallel_size=num_ranks, **options) as llm:
        (found,) = llm.score("what?", "that", instruction="look")
        template = llm.config.model.pooling.pair_template
        text = template.format(instruction="look", query="what?", document="that")
        assert found.prompt == text
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
        with torch.no_grad():
            logits = model(torch.tensor([found.prompt_token_ids])).logits[0, -1]
        expected = torch.sigmoid(logits[free[0]] - logits[free[1]])
        assert found.outputs.score == pytest.approx(float(expected), abs=1e-5)


def test_late_interaction_is_the_sum_of_the_nearest(folders, monkeypatch):
    options = {"task": "token_embed", "use_tqdm_on_load": False}
    with LLM(str(folders / "embedder"), **options) as llm:
        import msgspec

        # an embedder without its vectors: what is left is compared token by token
        (served,) = llm.models.values()
        pooling = msgspec.structs.replace(served.description.pooling, tasks=("token_embed",), late_interaction=True)
        served.pooling_inputs.pooling = pooling
        facts = msgspec.structs.replace(served.description, pooling=pooling)
        llm.models[served.description.name] = msgspec.structs.replace(served, description=facts)
        matrices = [one.outputs.array for one in llm.encode(TEXTS, pooling_task="token_embed")]
        expected = [float((matrices[0] @ other.T).max(1).sum()) for other in matrices[1:]]
        scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:])]
        np.testing.assert_allclose(scores, expected, rtol=1e-5)
        each = [one.outputs.score for one in llm.score(TEXTS[:2], TEXTS[2:4])]
        assert each[0] == pytest.approx(expected[1], rel=1e-5)
        # of many pairs no more queries are kept at once than there is room for
        most = llm.core.scheduler._queries._max_num_tokens = 8 * max(map(len, matrices))
        served.pooling_inputs.description = msgspec.structs.replace(facts, max_kept=most)
        firsts, seconds = (TEXTS * 20)[:70], (TEXTS[1:] * 20)[:70]
        made = dict(zip(TEXTS, matrices, strict=True))
        bars = []

        @contextmanager
        def progress(total, what, shown):
            bars.append([total, 0])

            def advance(num_tokens):
                bars[-1][1] += 1

            yield advance

        monkeypatch.setattr(async_engine, "progress", progress)
        many = [one.outputs.score for one in llm.score(firsts, seconds)]
        assert bars == [[140, 140]]  # one for all parts of the call
        wanted = [float((made[a] @ made[b].T).max(1).sum()) for a, b in zip(firsts, seconds, strict=True)]
        np.testing.assert_allclose(many, wanted, rtol=1e-5)
        with pytest.raises(InvalidPrompt, match="surrogate"):
            llm.score(TEXTS[0], ["fine", "\ud800"])
        llm.core.scheduler._queries._max_num_tokens = len(matrices[1]) - 1
        with pytest.raises(RequestTooLarge, match="can be kept for documents; shorten it"):  # however long it waited
            llm.score(TEXTS[:2], TEXTS[2:4])
        assert not llm.core.scheduler._queries and not llm.core.has_requests()  # the query is not kept for ever


def test_score_reads_as_many_tokens_of_a_text_as_extra_kwargs_say(cross):
    limits = PoolingParams(extra_kwargs={"max_tokens_per_query": 2, "max_tokens_per_doc": 3})
    found = cross.score("abcdef", ["ghijkl", "mn"], pooling_params=limits)
    wanted = cross.score("ab", ["ghi", "mn"])
    assert [one.outputs.score for one in found] == [one.outputs.score for one in wanted]
    assert [one.prompt_token_ids for one in found] == [one.prompt_token_ids for one in wanted]
    with pytest.raises(InvalidParams, match="extra_kwargs are for score and rerank"):
        cross.classify("a", pooling_params=limits)
    with pytest.raises(InvalidParams, match="it takes max_tokens_per_query and max_tokens_per_doc"):
        PoolingParams(extra_kwargs={"max_tokens": 3})
    with pytest.raises(InvalidParams, match="max_tokens_per_doc"):
        PoolingParams(extra_kwargs={"max_tokens_per_doc": 0})


# What cannot be


def test_the_wrong_task_for_the_model(embedder, cross, folders):
    with pytest.raises(InvalidParams, match="cross does not do embed; it does classify"):
        cross.embed("a")
    with pytest.raises(InvalidParams, match="embedder does not do classify; it does embed, token_embed"):
        embedder.classify("a")
    with pytest.raises(InvalidParams, match="does not generate text; it does embed"):
        embedder.generate("a")
    with pytest.raises(InvalidParams, match="does not generate text"):
        embedder.chat([{"role": "user", "content": "a"}])
    with pytest.raises(InvalidOption, match="task is classify"):
        LLM(str(folders / "embedder"), task="classify")
    assert embedder.embed("still here")[0].finished


def test_bad_input_does_not_affect_other_prompts(embedder):
    for prompts, error in ((["fine", []], InvalidPrompt), ([[1], [999]], InvalidPrompt), ([[5] * 129], PromptTooLong)):
        with pytest.raises(error):
            embedder.embed(prompts)
    with pytest.raises(InvalidParams, match="dimensions is 21"):
        embedder.embed("a", PoolingParams(dimensions=21))
    assert not embedder.core.has_requests() and embedder.embed("a")[0].outputs.data.shape == (20,)


def test_a_text_is_cut_as_the_folder_says_and_tokens_never_are(embedder):
    assert embedder.embed("x" * 500)[0].num_prompt_tokens == 64  # sentence_bert_config.json
    assert embedder.embed("x" * 500, truncate_prompt_tokens=-1)[0].num_prompt_tokens == 128
    assert embedder.embed([[5] * 128])[0].num_prompt_tokens == 128  # exactly the model's length


def test_truncation_by_tokenization_kwargs(embedder):
    (cut,) = embedder.embed("a b a b a b", tokenization_kwargs={"truncate_prompt_tokens": 4})
    assert len(cut.prompt_token_ids) == 4
    with pytest.raises(InvalidParams, match="give at most that"):
        embedder.embed("a b", tokenization_kwargs={"truncate_prompt_tokens": 10**6})
    with pytest.raises(InvalidParams, match="padding"):
        embedder.embed("a b", tokenization_kwargs={"padding": True})


def test_a_template_makes_the_prompt_of_a_pair(cross, embedder):
    template = (
        "{{ instruction | default('none') }} {% for message in messages %}"
        "{{ message.role[0] }} {{ message.content }} {% endfor %}"
    )
    (scored,) = cross.score("a b", "b c", chat_template=template, instruction="b")
    (written,) = cross.encode("b q a b d b c ", pooling_task="classify")
    assert scored.prompt_token_ids == written.prompt_token_ids
    assert scored.outputs.score == pytest.approx(float(written.outputs.data[0]))
    assert cross.rerank("a b", ["b c"], chat_template=template, instruction="b")[0].score == scored.outputs.score
    with pytest.raises(InvalidParams, match="cross-encoders"):
        embedder.score("a", "b", chat_template=template)


def test_a_long_pair_is_an_error_or_cut(cross):
    with pytest.raises(PromptTooLong, match="set truncate_prompt_tokens"):
        cross.score("q", "x" * 500)
    assert cross.score("q", "x" * 500, truncate_prompt_tokens=-1)[0].num_prompt_tokens == 128


def test_weights_that_are_not_numbers_are_reported(folders, tmp_path):
    from safetensors.torch import load_file, save_file

    write_tiny_encoder(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "word_embeddings" in name)
    weights[name][7] = float("nan")
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with LLM(str(tmp_path), use_tqdm_on_load=False) as llm:
        good, bad = llm.embed([[5, 6], [5, 7]])
        assert np.isfinite(good.outputs.data).all()
        assert bad.error is not None and "not finite" in bad.error
        with pytest.raises(SlipstreamError, match="not finite"):
            _ = bad.outputs


def test_the_asynchronous_engine_has_the_same_verbs(embedder, folders):
    async def run():
        engine = AsyncEngine(str(folders / "embedder"), device="cpu")
        try:
            vectors, scores, ranked = await asyncio.gather(
                engine.embed([*TEXTS, *TEXTS]), engine.score(TEXTS[0], TEXTS[1:]), engine.rerank(TEXTS[0], TEXTS[1:], 2)
            )
            with pytest.raises(InvalidPrompt):
                await engine.embed(["fine", []])
            tokens = await engine.encode(TEXTS[0], pooling_task="token_embed")
            return vectors, scores, ranked, tokens
        finally:
            await engine.close()

    vectors, scores, ranked, tokens = asyncio.run(run())
    for one, other in zip(vectors, embedder.embed([*TEXTS, *TEXTS]), strict=True):
        np.testing.assert_allclose(one.outputs.data, other.outputs.data, atol=1e-6)
    mine = embedder.score(TEXTS[0], TEXTS[1:])
    assert [one.outputs.score for one in scores] == pytest.approx([one.outputs.score for one in mine], abs=1e-6)
    assert ranked[0].index == int(np.argmax([one.outputs.score for one in mine]))
    assert tokens[0].outputs.data.shape == (3, 48)


def test_a_call_of_more_prompts_than_may_wait_feeds_itself_in(embedder, folders):
    texts = [f"{text} {number}" for number in range(8) for text in TEXTS]
    pairs = [(text, f"{text} {number}") for number in range(8) for text in TEXTS]

    async def run():
        engine = AsyncEngine(str(folders / "embedder"), device="cpu", max_waiting=3, max_num_seqs=2)
        try:
            return await engine.embed(texts), await engine.score(*map(list, zip(*pairs, strict=True)))
        finally:
            await engine.close()

    vectors, scores = asyncio.run(run())
    for one, other in zip(vectors, embedder.embed(texts), strict=True):
        np.testing.assert_allclose(one.outputs.data, other.outputs.data, atol=1e-6)
    assert len(scores) == len(pairs) and all(one.error is None for one in scores)


@pytest.mark.parametrize("kind", ["embedder", "decoder"])
def test_the_first_step_waits_only_for_those_it_has_room_for(folders, kind, monkeypatch):
    prompts = [[5 + place % 40, 6 + place // 40] for place in range(200)]
    with LLM(
        str(folders / kind), max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, use_tqdm_on_load=False
    ) as llm:
        taken = []
        launch = llm.core.executor.launch

        def launched(plan):
            taken.append(len(llm._engine._requests))
            launch(plan)

        monkeypatch.setattr(llm.core.executor, "launch", launched)
        alone = llm.encode(prompts[:1], pooling_task="embed")[0].outputs.data
        taken.clear()
        found = llm.encode(prompts, pooling_task="embed", use_tqdm=False)
        assert taken[0] == 8 and len(taken) == 25 and len(found) == 200
        np.testing.assert_allclose(found[0].outputs.data, alone, atol=1e-5)
