"""Arguments of vLLM's constructor under their own names, and the options that they set."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripted_core import facts
from sentence_files import BERT, read
from slipstream import PoolerConfig, SamplingParams
from slipstream.base.errors import InvalidOption, InvalidParams, ModelNotFound
from slipstream.checkpoint.generation import read_generation_defaults
from slipstream.config.options import make_options
from slipstream.engine.build import estimate_build
from slipstream.front.inputs import InputProcessor
from slipstream.front.served import FrontEndArgs
from tiny import write_tiny


@pytest.mark.parametrize(
    ("given", "option", "value"),
    [
        ({"block_size": 32}, "page_size", 32),
        ({"kv_cache_memory_bytes": 2**20}, "kv_cache_memory", 2**20),
        ({"num_gpu_blocks_override": 9}, "num_pages", 9),
        ({"dtype": "half"}, "dtype", "float16"),
        ({"dtype": "float"}, "dtype", "float32"),
        ({"dtype": torch.bfloat16}, "dtype", "bfloat16"),
        ({"runner": "generate"}, "task", "generate"),
        ({"runner": "pooling"}, "task", "auto"),
        ({"convert": "embed"}, "task", "embed"),
        ({"async_scheduling": False}, "depth", 0),
        ({"async_scheduling": True}, "depth", 1),
        ({"served_model_name": ["one"]}, "served_model_name", "one"),
        ({"pooler_config": PoolerConfig(pooling_type="MEAN", use_activation=False)}, "pooling_type", "mean"),
        ({"pooler_config": {"seq_pooling_type": "CLS", "use_activation": False}}, "use_activation", False),
        ({"spec_method": "ngram", "spec_tokens": 3}, "speculative_config",
         {"method": "ngram", "num_speculative_tokens": 3}),
        ({"enable_prefix_caching": None}, "enable_prefix_caching", True),
        ({"seed": None}, "seed", 0),
        ({"tokenizer": Path("a/b")}, "tokenizer", "a/b"),
        ({"trust_remote_code": True, "swap_space": 4, "disable_custom_all_reduce": True}, "model", None),
        ({"config_format": "mistral", "tokenizer_mode": "mistral", "load_format": "mistral"}, "load_format", "auto"),
    ],
)  # fmt: skip
def test_an_argument_sets_the_option_with_its_meaning(given, option, value):
    assert getattr(make_options(**given), option) == value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"block_size": 32, "page_size": 16}, "block_size and page_size"),
        ({"runner": "draft"}, "runner"),
        ({"convert": "reward"}, "convert"),
        ({"async_scheduling": "yes"}, "async_scheduling"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy"),
        ({"served_model_name": ["one", "two"]}, "served_model_name"),
        ({"pooler_config": {"dimensions": 3}}, "PoolerConfig.dimensions"),
        ({"pooler_config": {"pool_type": "mean"}}, "PoolerConfig has no pool_type"),
        ({"pooler_config": {"pooling_type": "MEAN", "tok_pooling_type": "ALL"}}, "several pooling types"),
        ({"spec_method": "ngram", "speculative_config": {"method": "ngram"}}, "spec_method"),
        ({"lora_dtype": "float16"}, "lora_dtype"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size"),
        ({"dtype": "int3"}, "dtype"),
        ({"tensor_paralel_size": 1}, "there is no option tensor_paralel_size"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given, words):
    with pytest.raises(InvalidOption, match=words):
        make_options(**given)


def test_hf_overrides_replace_fields_of_the_config(tmp_path):
    folder = str(write_tiny(tmp_path, "llama"))
    small = dict(model=folder, load_format="dummy", max_num_seqs=2)
    assert estimate_build(make_options(**small, hf_overrides={"num_hidden_layers": 1}))[0].model.info.num_layers == 1
    text = '{"max_position_embeddings": 32}'
    assert estimate_build(make_options(**small, hf_overrides=text))[0].scheduler.max_model_len == 32
    with pytest.raises(InvalidOption, match="hf_overrides"):
        estimate_build(make_options(**small, hf_overrides="[1]"))


def test_a_head_dtype_is_the_one_that_heads_have_or_is_refused(tmp_path):
    scores = str(write_tiny(tmp_path / "scores", "qwen3", architectures=["Qwen3ForSequenceClassification"]))
    texts = str(write_tiny(tmp_path / "texts", "llama"))
    small = dict(load_format="dummy", max_num_seqs=2, device="cpu")

    def given(model, dtype, head):
        estimate_build(make_options(model=model, dtype=dtype, hf_overrides={"head_dtype": head}, **small))

    for head in ("float32", torch.float32):
        given(scores, "bfloat16", head)
    given(scores, "float32", "model")
    given(texts, "bfloat16", "model")
    with pytest.raises(InvalidOption, match="head_dtype.*float32"):
        given(scores, "bfloat16", "model")
    with pytest.raises(InvalidOption, match="head_dtype.*bfloat16"):
        given(texts, "bfloat16", "float32")
    with pytest.raises(InvalidOption, match="head_dtype"):
        given(texts, "float32", "float31")


def test_a_folder_in_the_layout_of_mistral_alone_is_refused_by_name(tmp_path):
    (tmp_path / "params.json").write_text("{}")
    with pytest.raises(ModelNotFound, match=r"params\.json.*Hugging Face layout"):
        estimate_build(make_options(model=str(tmp_path), config_format="mistral"))


def test_sampling_defaults_come_from_the_source_that_is_named(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    for folder, text in ((own, '{"temperature": 0.3, "top_k": 9, "eos_token_id": 7}'), (other, '{"top_p": 0.5}')):
        folder.mkdir()
        (folder / "generation_config.json").write_text(text)
    assert read_generation_defaults(own).params == {"temperature": 0.3, "top_k": 9}
    assert read_generation_defaults(own, "vllm").params == {} and read_generation_defaults(own, "vllm").eos_token_ids
    assert read_generation_defaults(own, str(other)).params == {"top_p": 0.5}
    assert read_generation_defaults(own, "auto", {"temperature": 0.9}).params == {"temperature": 0.9, "top_k": 9}
    with pytest.raises(InvalidOption, match="generation_config"):
        read_generation_defaults(own, str(tmp_path))
    with pytest.raises(InvalidOption, match="override_generation_config"):
        read_generation_defaults(own, "auto", {"temperature": -1})


def test_arguments_of_the_front_end():
    options = {"max_logprobs": 5, "reasoning_parser": "qwen3", "seed": 1}
    assert FrontEndArgs.take(options) == FrontEndArgs(max_logprobs=5, reasoning_parser="qwen3") and options == {
        "seed": 1
    }
    for wrong in ({"max_logprobs": -2}, {"reasoning_parser": "nonsense"}, {"max_logprobs": "all"}):
        with pytest.raises(InvalidOption, match=next(iter(wrong))):
            FrontEndArgs.take(wrong)


def test_max_logprobs_limits_requests(tmp_path):
    inputs = InputProcessor(facts(tmp_path), None)
    inputs.checks.max_logprobs = 5
    inputs.prepare("a", [1], SamplingParams(logprobs=5, prompt_logprobs=5))
    for wrong in ({"logprobs": 6}, {"prompt_logprobs": 6}, {"logprobs": -1}):
        with pytest.raises(InvalidParams, match="raise max_logprobs"):
            inputs.prepare("a", [1], SamplingParams(**wrong))


def test_use_activation_is_normalising_or_the_activation_of_classes(tmp_path):
    assert read(tmp_path / "b", BERT, {"use_activation": True}).normalize
    assert not read(tmp_path / "c", BERT, {"use_activation": False}).normalize
    classes = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 3}
    assert read(tmp_path / "d", classes, {"use_activation": False}).classify_activation == "identity"
    assert read(tmp_path / "e", classes, {"use_activation": True}).classify_activation == "softmax"
    with pytest.raises(InvalidOption, match="use_activation and normalize differ"):
        read(tmp_path / "f", BERT, {"use_activation": False, "normalize": True})
