"""Encoders other than BERT from GGUF files: the vectors of the folder that each file was made from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from jina_bert_oracle import QK_NORM, write_jina_bert
from slipstream import LLM
from slipstream.base.errors import BadTokenizer, UnsupportedModel
from slipstream.text.gguf_vocab import gguf_tokenizer
from tiny_encoder import write_modules, write_tiny_encoder
from tiny_gguf_encoders import precompiled_charsmap, unigram_fields, write_encoder_gguf
from tiny_tokenizer import byte_tokenizer

IDS = [[5, 6, 7, 40], list(range(9, 100)), [3]]
CHARSMAP = precompiled_charsmap({"Ａ": "A", "ﬁ": "fi", "\t": " ", "…": "..."})
UNIGRAM_TEXTS = [
    "The rain in Spain", "  two  spaces\tand a tab ", "Ａ ﬁne day…", "<s> the <mask> rains", "日本 the 語",
    "the [PAD290]", "thethethe",
]  # fmt: skip


def vectors(model: Path, task: str = "embed") -> list[Any]:
    with LLM(str(model), device="cpu", use_tqdm_on_load=False, skip_tokenizer_init=True) as llm:
        return [one.outputs.data for one in llm.encode([{"prompt_token_ids": ids} for ids in IDS], pooling_task=task)]


def assert_same_vectors(file: Path, folder: Path) -> None:
    for task in ("embed", "token_embed"):
        for one, other in zip(vectors(file, task), vectors(folder, task), strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("pooling", "module"), [(gguf.PoolingType.LAST, "lasttoken"), (gguf.PoolingType.MEAN, "mean")])
def test_eurobert_gives_the_vectors_of_its_folder(tmp_path: Path, pooling: gguf.PoolingType, module: str) -> None:
    folder = write_tiny_encoder(tmp_path, "eurobert")
    write_modules(folder, module)
    assert_same_vectors(write_encoder_gguf(folder, {"eurobert.pooling_type": int(pooling)}), folder)


@pytest.mark.parametrize(("family", "pre"), [("eurobert", "llama-bpe"), ("roberta", "roberta-bpe")])
def test_byte_level_vocabularies_add_the_tokens_that_the_file_names(tmp_path: Path, family: str, pre: str) -> None:
    letters = sorted(byte_tokenizer().get_vocab(with_added_tokens=False).items(), key=lambda item: item[1])
    tokens = [*(letter for letter, _ in letters), "<|begin_of_text|>", "<|end_of_text|>", "ab"]
    vocabulary = {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": [1] * 256 + [3, 3, 1], "merges": ["a b"],
        "bos_token_id": 256, "eos_token_id": 257, "add_bos_token": True, "add_eos_token": True,
    }  # fmt: skip
    folder = write_tiny_encoder(tmp_path, family)
    file = write_encoder_gguf(folder, {f"tokenizer.ggml.{name}": value for name, value in vocabulary.items()})
    with LLM(str(file), device="cpu", use_tqdm_on_load=False) as llm:
        assert llm.embed(["abc"])[0].prompt_token_ids == [256, 258, tokens.index("c"), 257]


def test_a_decoder_without_causal_attention_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "eurobert")
    file = write_encoder_gguf(folder)
    file.write_bytes(file.read_bytes().replace(b"eurobert", b"seed_oss"))  # a name of the same length
    with pytest.raises(UnsupportedModel, match="see the whole text"):
        LLM(str(file), device="cpu", use_tqdm_on_load=False)


def unigram_tokenizer() -> Tokenizer:
    """As tokenizer.json of XLM-RoBERTa: special tokens first, the mask last."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Precompiled(CHARSMAP)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trainer = trainers.UnigramTrainer(vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False)
    words = "the rain in Spain falls on two spaces and a fine day with a tab of rains. PAD [290] ..."
    tokenizer.train_from_iterator([words, words.lower()], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


@pytest.mark.parametrize("family", ["roberta", "xlm-roberta"])
def test_roberta_gives_the_vectors_of_its_folder(tmp_path: Path, family: str) -> None:
    """The file has no rows of positions before that of the first token."""
    folder = write_tiny_encoder(tmp_path, family)
    write_modules(folder, "cls")
    assert_same_vectors(write_encoder_gguf(folder, {"bert.pooling_type": int(gguf.PoolingType.CLS)}), folder)


def test_texts_become_the_tokens_of_a_unigram_vocabulary(tmp_path: Path) -> None:
    folder = write_tiny_encoder(tmp_path, "xlm-roberta")
    own = unigram_tokenizer()
    ends = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    file = write_encoder_gguf(folder, unigram_fields(own, 304, CHARSMAP) | ends)
    with LLM(str(file), device="cpu", use_tqdm_on_load=False) as llm:
        found = llm.embed(UNIGRAM_TEXTS)
    assert [one.prompt_token_ids for one in found] == [own.encode(text).ids for text in UNIGRAM_TEXTS]


def test_a_unigram_vocabulary_without_fields_for_ends_adds_eos() -> None:
    own = unigram_tokenizer()
    tokenizer = gguf_tokenizer(unigram_fields(own, 304, CHARSMAP))
    assert tokenizer.encode("the").ids == own.encode("the").ids[1:]
    assert tokenizer.decode(tokenizer.encode("the rain").ids) == "the rain"


def test_a_unigram_vocabulary_without_an_unknown_token_is_broken() -> None:
    fields = unigram_fields(unigram_tokenizer(), 304, CHARSMAP)
    del fields["tokenizer.ggml.unknown_token_id"]
    fields["tokenizer.ggml.token_type"] = [1] * 304
    with pytest.raises(BadTokenizer, match="there is no unknown token"):
        gguf_tokenizer(fields)


@pytest.mark.parametrize("gate_apart", [False, True], ids=["one matrix", "gate apart"])
@pytest.mark.parametrize("facts", [{}, {"auto_map": QK_NORM}], ids=["english", "code"])
def test_jina_bert_gives_the_vectors_of_its_folder(tmp_path: Path, facts: dict[str, Any], gate_apart: bool) -> None:
    folder = write_jina_bert(tmp_path, **facts)
    write_modules(folder, "mean")
    fields = {"jina-bert-v2.pooling_type": int(gguf.PoolingType.MEAN)}
    assert_same_vectors(write_encoder_gguf(folder, fields, gate_apart=gate_apart), folder)


@pytest.mark.parametrize("feed", ["relu", "gated-gelu"])
def test_t5_encoder_gives_the_vectors_of_its_folder(tmp_path: Path, feed: str) -> None:
    """A file does not say from which distance on all are in one bucket: it is 128 in all published models."""
    folder = write_tiny_encoder(tmp_path, "t5", feed_forward_proj=feed, relative_attention_max_distance=128)
    write_modules(folder, "mean")
    assert_same_vectors(write_encoder_gguf(folder), folder)


SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
T5_SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "relative_attention_max_distance": 128}


@pytest.mark.parametrize("family", ["eurobert", "xlm-roberta", "jina", "jina code", "jina code gate apart", "t5"])
def test_low_bit_weights_are_near(tmp_path: Path, family: str) -> None:
    if family.startswith("jina"):
        folder = write_jina_bert(tmp_path, **SIZES, **({"auto_map": QK_NORM} if "code" in family else {}))
    else:
        folder = write_tiny_encoder(tmp_path, family, **(T5_SIZES if family == "t5" else SIZES))
    write_modules(folder, "mean")
    file = write_encoder_gguf(folder, gate_apart="apart" in family, kind=gguf.GGMLQuantizationType.Q8_0)
    for one, other in zip(vectors(file), vectors(folder), strict=True):
        assert one @ other > 0.999
