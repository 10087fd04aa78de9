"""speculative_config: vLLM's names, and one clear error for everything that is not supported."""

from __future__ import annotations

import msgspec
import pytest

from slipstream.base.errors import InvalidOption
from slipstream.config.config import MAX_DRAFTS, DraftConfig, check_draft_ranks, read_draft_config


def test_the_fields_have_vllms_names() -> None:
    given = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    assert read_draft_config(given) == DraftConfig("ngram", 5, 1, 3, None)
    as_json = '{"method": "ngram_gpu", "num_speculative_tokens": 2}'
    assert read_draft_config(as_json) == DraftConfig("ngram", 2, 2, 4, None)
    suffix = read_draft_config({"method": "suffix"})
    assert suffix is not None and suffix.drafts_per_match == 1 and suffix.max_match > 8
    assert read_draft_config(None) is None
    by_model = DraftConfig("draft_model", 3, model="some/model")
    found = read_draft_config({"model": "some/model", "num_speculative_tokens": 3})
    assert found == msgspec.structs.replace(by_model, is_given=False)


def test_fields_of_vllm_that_change_nothing() -> None:
    given = {"method": "suffix", "max_model_len": 64, "enforce_eager": True}
    assert read_draft_config(given) == read_draft_config({"method": "suffix"})
    by_model = {"model": "[ngram]", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 1}
    assert read_draft_config(by_model) == read_draft_config({**by_model, "model": None, "method": "ngram"})


def test_a_drafter_runs_on_all_ranks_of_its_model() -> None:
    given = {"method": "draft_model", "model": "some/model", "draft_tensor_parallel_size": 2}
    assert read_draft_config(given) == DraftConfig("draft_model", 4, model="some/model")
    check_draft_ranks(given, 2)
    check_draft_ranks('{"method": "ngram", "draft_tensor_parallel_size": 1}', 1)
    for absent in (None, {"method": "ngram"}, {"method": "ngram", "draft_tensor_parallel_size": None}):
        check_draft_ranks(absent, 4)
    for num_ranks in (1, 4):
        with pytest.raises(InvalidOption, match=f"is 2, and tensor_parallel_size is {num_ranks}; .* the same number"):
            check_draft_ranks(given, num_ranks)
    for odd in (True, "1", [1], 1.5):
        with pytest.raises(InvalidOption, match="draft_tensor_parallel_size of speculative_config is"):
            check_draft_ranks({"method": "ngram", "draft_tensor_parallel_size": odd}, 1)


def test_the_short_form() -> None:
    assert read_draft_config(None, "ngram:3") == read_draft_config({"method": "ngram", "num_speculative_tokens": 3})
    assert read_draft_config(None, "suffix") == read_draft_config({"method": "suffix"})


def test_one_bound_alone_moves_the_other() -> None:
    low = read_draft_config({"method": "ngram", "prompt_lookup_max": 1})
    high = read_draft_config({"method": "ngram", "prompt_lookup_min": 9})
    assert low is not None and (low.min_match, low.max_match) == (1, 1)
    assert high is not None and (high.min_match, high.max_match) == (9, 9)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "has no method"),
        ({"method": "medusa", "model": "x"}, "drafts by medusa are not supported: it has a head for each draft"),
        ({"method": "eagle3"}, "drafts by eagle3 need a model"),
        ({"method": "draft_model"}, "drafts by draft_model need a model"),
        ({"model": "some/model", "prompt_lookup_max": 3}, "prompt_lookup_max, which draft_model does not use"),
        ({"method": "mtp", "model": "x"}, "needs none"),
        ({"method": "n-gram"}, "there is no method 'n-gram'"),
        ({"method": "ngram", "model": "x"}, "needs none"),
        ({"method": "ngram", "num_speculative_token": 3}, "did you mean num_speculative_tokens"),
        ({"method": "ngram", "num_speculative_tokens": 0}, f"from 1 to {MAX_DRAFTS}"),
        ({"method": "ngram", "num_speculative_tokens": True}, "give a whole number"),
        ({"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 3}, "prompt_lookup_min is 3"),
        ({"method": "ngram", "tensor_parallel_size": 2}, "did you mean draft_tensor_parallel_size"),
        ({"method": "ngram", "prompt_lookup_min": "2"}, "prompt_lookup_min of speculative_config is '2'"),
        ({"method": "ngram", "prompt_lookup_min": 65}, "prompt_lookup_min of speculative_config is 65"),
        ({"method": ["ngram"]}, "method of speculative_config is"),
        ({"method": "mtp", "model": {}}, "model of speculative_config is {}"),
        (5, "give an object with a method"),
        (["method"], "give an object with a method"),
        ("ngram", "give a JSON object"),
        ("[1]", "give a JSON object"),
    ],
)
def test_mistakes(given, says: str) -> None:
    with pytest.raises(InvalidOption, match=says.replace("[", r"\[")):
        read_draft_config(given)


def test_mistakes_of_the_short_form() -> None:
    for short, says in (
        ("ngram:x", "as ngram:4"),
        ("dflash:3", "drafts by dflash need a model"),
        ("dspark:3", "not supported"),
    ):
        with pytest.raises(InvalidOption, match=says):
            read_draft_config(None, short)
    with pytest.raises(InvalidOption, match="both given"):
        read_draft_config({"method": "ngram"}, "ngram")
