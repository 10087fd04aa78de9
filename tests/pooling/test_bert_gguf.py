"""BERT from a GGUF file: the vectors and tokens of the folder it was made from."""

import string

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from slipstream import LLM
from slipstream.base.errors import BadTokenizer, ModelNotFound, UnsupportedModel
from slipstream.checkpoint.locate import default_embedder
from slipstream.text.gguf_vocab import gguf_tokenizer
from tiny_encoder import write_modules, write_tiny_encoder
from tiny_gguf import bert_vocab, write_bert_gguf

Kind = gguf.GGMLQuantizationType
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *string.ascii_lowercase, "the", "rain", ".", "?"]
WORDS += [f"##{piece}" for piece in (*string.ascii_lowercase, "ing")]
TEXTS = ["The rain.", "rainy?", "raining the rain", "Ünlike"]
IDS = [[5, 6, 7, 40], [9] * 30, [3]]


def write(folder, kind=Kind.F32, pooling=None):
    write_tiny_encoder(folder, "bert", "Model", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    words = [*WORDS, *(f"[unused{number}]" for number in range(304 - len(WORDS)))]
    return write_bert_gguf(folder, words, kind, pooling)


def vectors(model, prompts, task="embed", **options):
    with LLM(str(model), device="cpu", use_tqdm_on_load=False, **options) as llm:
        return [one.outputs.data for one in llm.encode(prompts, pooling_task=task)]


@pytest.mark.parametrize(
    ("pooling", "module"),
    [(gguf.PoolingType.CLS, "cls"), (gguf.PoolingType.MEAN, "mean"), (None, "mean")],
    ids=["cls", "mean", "unsaid"],
)
def test_vectors_are_those_of_the_folder(tmp_path, pooling, module):
    path = write(tmp_path, pooling=pooling)
    write_modules(tmp_path, module)
    for task in ("embed", "token_embed"):
        options = {} if task == "embed" else {"skip_tokenizer_init": True}
        wanted = vectors(tmp_path, IDS, task, **options)
        for one, other in zip(vectors(path, IDS, task), wanted, strict=True):
            np.testing.assert_allclose(one, other, atol=1e-5)


def test_low_bit_weights_are_near(tmp_path):
    path = write(tmp_path, Kind.Q8_0)
    write_modules(tmp_path, "mean")
    for one, other in zip(vectors(path, IDS), vectors(tmp_path, IDS), strict=True):
        assert one @ other > 0.999


def test_texts_become_words_and_pieces(tmp_path):
    path = write(tmp_path, pooling=gguf.PoolingType.CLS)
    with LLM(str(path), device="cpu", use_tqdm_on_load=False) as llm:
        found = llm.embed(TEXTS)
        shown = [[llm.tokenizer.backend.id_to_token(i) for i in one.prompt_token_ids] for one in found]
        alone = llm.embed([found[0].prompt_token_ids])[0]
        np.testing.assert_allclose(found[0].outputs.data, alone.outputs.data, atol=1e-6)
    assert shown == [
        ["[CLS]", "the", "rain", ".", "[SEP]"],
        ["[CLS]", "rain", "##y", "?", "[SEP]"],
        ["[CLS]", "rain", "##ing", "the", "rain", "[SEP]"],
        ["[CLS]", "u", "##n", "##l", "##i", "##k", "##e", "[SEP]"],
    ]


def test_a_reranker_is_refused_by_name(tmp_path):
    path = write(tmp_path, pooling=gguf.PoolingType.RANK)
    with pytest.raises(UnsupportedModel, match="is a reranker, which runs here from a folder"):
        LLM(str(path), device="cpu", use_tqdm_on_load=False)


def test_a_pair_has_its_types():
    tokenizer = gguf_tokenizer(bert_vocab(WORDS))
    found = tokenizer.encode("the rain", "rain")
    assert found.tokens == ["[CLS]", "the", "rain", "[SEP]", "rain", "[SEP]"]
    assert found.type_ids == [0, 0, 0, 0, 1, 1]


def test_a_vocabulary_with_capitals_keeps_them():
    tokenizer = gguf_tokenizer(bert_vocab([*WORDS, "The", "Ü"]))
    assert tokenizer.encode("The the Ü").tokens == ["[CLS]", "The", "the", "Ü", "[SEP]"]


@pytest.mark.parametrize("missing", ["[CLS]", "[SEP]", "[UNK]"])
def test_a_vocabulary_without_its_marks_is_broken(missing):
    with pytest.raises(BadTokenizer, match="there is no token"):
        gguf_tokenizer(bert_vocab([word for word in WORDS if word != missing]))


def test_marks_may_have_other_names():
    fields = bert_vocab([*(word for word in WORDS if word not in ("[CLS]", "[SEP]")), "<s>", "</s>"])
    count = len(fields["tokenizer.ggml.tokens"])
    fields["tokenizer.ggml.token_type"][-2:] = [3, 3]
    fields["tokenizer.ggml.tokens"][-2:] = ["<s>", "</s>"]
    fields |= {"tokenizer.ggml.bos_token_id": count - 2, "tokenizer.ggml.eos_token_id": count - 1}
    assert gguf_tokenizer(fields).encode("the").tokens == ["<s>", "the", "</s>"]


def test_a_real_vocabulary_gives_the_tokens_of_its_own_file():
    try:
        own = Tokenizer.from_file(str(default_embedder().path / "tokenizer.json"))
    except ModelNotFound as missing:
        pytest.skip(str(missing))
    own.no_truncation()
    own.no_padding()
    words = sorted(own.get_vocab(), key=own.get_vocab().__getitem__)
    tokenizer = gguf_tokenizer(bert_vocab(words))
    texts = [
        "Der Zug nach Zürich, 10 Minuten!",
        "今日は良い天気",
        "naïve café's [MASK] don't",
        "x" * 120,
        "a\tb\u200bc \x07",
    ]
    for text in texts:
        assert tokenizer.encode(text).ids == own.encode(text).ids
