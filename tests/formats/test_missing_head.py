"""Checkpoints of models that continue text, published without the projection to tokens: they embed, and say so."""

from __future__ import annotations

from pathlib import Path

import pytest

from pool_bench import rewrite
from slipstream import LLM
from slipstream.base.errors import BadCheckpoint, InvalidOption, InvalidParams
from tiny import write_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rewrite(write_tiny(tmp_path_factory.mktemp("tiny"), "qwen3"), {}, {}, without=("lm_head.weight",))


def make(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), use_tqdm_on_load=False, max_model_len=64, num_threads=1, **options)  # type: ignore[arg-type]


def test_a_request_to_generate_is_refused_and_the_engine_lives(folder: Path) -> None:
    with make(folder) as llm:
        before = llm.embed("some text")[0].outputs.embedding
        for ask in (lambda: llm.generate("some text"), lambda: llm.chat([{"role": "user", "content": "hello"}])):
            with pytest.raises(InvalidParams, match=r"does not generate text.*lm_head\.weight.*embed"):
                ask()
        assert list(llm.embed("some text")[0].outputs.embedding) == list(before)


def test_the_task_generate_is_refused_at_the_start(folder: Path) -> None:
    with pytest.raises(InvalidOption, match=r"task is generate.*lm_head\.weight"):
        make(folder, task="generate")


def test_a_reranker_that_asks_for_yes_or_no_needs_its_head(folder: Path) -> None:
    named = folder.with_name("Some-Reranker")
    named.symlink_to(folder)
    with pytest.raises(BadCheckpoint, match=r"Qwen3-Reranker.*lm_head\.weight"):
        make(named)
    named.unlink()


def test_an_embedder_scores_by_its_vectors(folder: Path) -> None:
    with make(folder, task="score") as llm:
        vectors = [result.outputs.embedding for result in llm.embed(["one text", "another"])]
        expected = sum(a * b for a, b in zip(*vectors, strict=True))
        assert llm.score("one text", "another")[0].outputs.score == pytest.approx(expected, abs=1e-5)


def test_random_weights_have_a_head(folder: Path) -> None:
    with make(folder, load_format="dummy") as llm:
        assert len(llm.generate("some text")[0].outputs[0].token_ids) == 16
