"""Several models in one engine: each method finds its model, and results are the same as alone."""

from __future__ import annotations

import asyncio
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from slipstream import LLM, AsyncEngine, SamplingParams
from slipstream.base.errors import BadCheckpoint, EngineAsleep, InvalidOption, ModelNotFound
from slipstream.device.device import Device
from tiny import write_tiny
from tiny_encoder import write_modules, write_tiny_encoder

TEXTS = ["a", "the cat sat on the mat", "rain", "where is the station, please?"]
PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
QUIET = {"use_tqdm_on_load": False}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny(root / "chat", "qwen3")
    write_modules(write_tiny_encoder(root / "embed"), "mean")
    write_tiny_encoder(root / "rerank", task="ForSequenceClassification", num_labels=1)
    return {name: str(root / name) for name in ("chat", "embed", "rerank")}


@pytest.fixture(scope="module")
def llm(folders):
    with LLM(models=folders, dtype="float64", **QUIET) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(folders):
    """What each says when it has an engine to itself."""
    found = {}
    with LLM(folders["chat"], dtype="float64", **QUIET) as llm:
        found["texts"] = [one.outputs[0].token_ids for one in llm.generate(TEXTS, PARAMS, use_tqdm=False)]
    with LLM(folders["embed"], dtype="float64", **QUIET) as llm:
        found["vectors"] = [one.outputs.embedding for one in llm.embed(TEXTS)]
    with LLM(folders["rerank"], dtype="float64", **QUIET) as llm:
        found["scores"] = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:])]
    return found


def test_each_verb_goes_to_the_model_made_for_it(llm, alone):
    assert [one.outputs[0].token_ids for one in llm.generate(TEXTS, PARAMS, use_tqdm=False)] == alone["texts"]
    np.testing.assert_allclose([one.outputs.embedding for one in llm.embed(TEXTS)], alone["vectors"], atol=1e-9)
    scores = [one.outputs.score for one in llm.score(TEXTS[0], TEXTS[1:])]
    np.testing.assert_allclose(scores, alone["scores"], atol=1e-9)
    ranked = llm.rerank(TEXTS[0], TEXTS[1:])
    assert [one.index for one in ranked] == list(np.argsort(-np.array(alone["scores"]), kind="stable"))


def test_a_model_can_be_named(llm):
    from_chat = llm.embed(TEXTS, model="chat")  # any model that continues text can also embed it
    assert len(from_chat[0].outputs.embedding) == llm.cores["chat"].config.model.info.hidden_size
    with pytest.raises(ModelNotFound, match="there is chat, embed, rerank"):
        llm.embed(TEXTS, model="other")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_all_at_once_changes_nothing(folders, alone, depth):
    async def scenario():
        engine = AsyncEngine(models=folders, dtype="float64", depth=depth)

        async def text(prompt):
            results = [result async for result in engine.generate(prompt, PARAMS)]
            return results[-1].outputs[0].token_ids

        try:
            return await asyncio.gather(
                asyncio.gather(*map(text, TEXTS)),
                asyncio.gather(*(engine.embed(one) for one in TEXTS)),
                engine.score(TEXTS[0], TEXTS[1:]),
            )
        finally:
            await engine.close()

    texts, vectors, scores = asyncio.run(scenario())
    assert texts == alone["texts"]
    np.testing.assert_allclose([one[0].outputs.embedding for one in vectors], alone["vectors"], atol=1e-9)
    np.testing.assert_allclose([one.outputs.score for one in scores], alone["scores"], atol=1e-9)


def test_weights_that_were_exchanged_in_part_stop_their_own_model_only(folders, alone):
    def lost():
        yield "model.norm.weight", torch.zeros(64)
        raise ConnectionError("the trainer is gone")

    with LLM(models=folders, dtype="float64", **QUIET) as llm:
        begun = llm.stream(TEXTS[0], PARAMS)
        next(begun)
        with pytest.raises(ConnectionError):
            llm.update_weights(lost(), model="chat")
        vectors = [one.outputs.embedding for one in llm.embed(TEXTS)]
        np.testing.assert_allclose(vectors, alone["vectors"], atol=1e-9)
        with pytest.raises(EngineAsleep, match="weights of chat .* call update_weights"):
            llm.generate(TEXTS, PARAMS, use_tqdm=False)
        with pytest.raises(EngineAsleep, match="weights of chat"):
            list(begun)
        llm.update_weights(model="chat")
        assert [one.outputs[0].token_ids for one in llm.generate(TEXTS, PARAMS, use_tqdm=False)] == alone["texts"]


def test_the_models_share_one_device(llm):
    assert len({id(core.executor.device) for core in llm.cores.values()}) == 1


def test_mistakes_in_models_are_named(folders):
    with pytest.raises(InvalidOption, match="both given"):
        LLM(folders["chat"], models=folders, **QUIET)
    with pytest.raises(InvalidOption, match="holds nothing"):
        LLM(models={}, **QUIET)
    with pytest.raises(InvalidOption, match="two models are called"):
        LLM(models={"a": {"model": folders["chat"], "served_model_name": "b"}, "b": folders["chat"]}, **QUIET)


def test_each_may_have_options_of_its_own(folders):
    models = {"chat": {"model": folders["chat"], "max_model_len": 32}, "embed": folders["embed"]}
    with LLM(models=models, max_num_seqs=4, **QUIET) as llm:
        lengths = {name: core.config.scheduler.max_model_len for name, core in llm.cores.items()}
        assert lengths["chat"] == 32 and lengths["embed"] > 32
        assert {core.config.scheduler.max_num_seqs for core in llm.cores.values()} == {4}


def test_the_device_is_given_back_when_one_of_them_cannot_be_loaded(folders, tmp_path):
    class Watched(Device):
        closed = False

        def close(self):
            super().close()
            self.closed = True

    shutil.copytree(folders["embed"], tmp_path / "broken")
    save_file({"x": torch.zeros(1)}, tmp_path / "broken" / "model.safetensors")
    device = Watched(1, 1)
    with pytest.raises(BadCheckpoint):
        LLM(models={"one": folders["embed"], "two": str(tmp_path / "broken")}, depth=1, _device=device, **QUIET)
    assert device.closed
