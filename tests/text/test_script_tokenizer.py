"""The tokenizer of `get_tokenizer` against transformers on the same files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, processors

from slipstream.base.errors import InvalidParams
from slipstream.text.script_tokenizer import ScriptTokenizer
from slipstream.text.tokenizer import Tokenizer
from tiny_tokenizer import write_byte_tokenizer

transformers = pytest.importorskip("transformers")
TEXTS = ["Hello there!", "né 🙂 <|im_end|> don't . stop", "", "a longer text with several words in it"]
NAMED = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [*NAMED, "hello", "there", "a", "longer", "text", "with", "##s", "!", ".", "don", "'", "t"]


def write_words(folder):
    """A tokenizer of BERT's kind, with special tokens around texts and pairs."""
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    backend.add_special_tokens(NAMED)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    named = {f"{name.strip('[]').lower()}_token": name for name in NAMED}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named, "model_max_length": 8}
    config |= {"model_input_names": ["input_ids", "token_type_ids", "attention_mask"], "padding_side": "left"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"clean_up_tokenization_spaces": True, "additional_special_tokens": ["[MASK]"]})
    )


@pytest.fixture(scope="module", params=["bytes", "words"])
def pair(request, tmp_path_factory):
    """Ours and that of transformers."""
    folder = tmp_path_factory.mktemp("tokenizer") / "one"
    (write_byte_tokenizer if request.param == "bytes" else write_words)(folder)
    return (
        ScriptTokenizer(Tokenizer.load(folder), str(folder)),
        transformers.AutoTokenizer.from_pretrained(folder),
    )


def same(ours, theirs):
    """Equal values of equal kinds."""
    if isinstance(theirs, torch.Tensor):
        return isinstance(ours, torch.Tensor) and torch.equal(ours, theirs)
    if isinstance(theirs, np.ndarray):
        return isinstance(ours, np.ndarray) and np.array_equal(ours, theirs)
    if isinstance(theirs, transformers.BatchEncoding):
        return list(ours) == list(theirs) and all(same(ours[name], theirs[name]) for name in theirs)
    return type(ours) is type(theirs) and ours == theirs


CALLS = {
    "one": lambda t: t(TEXTS[0]),
    "many": lambda t: t(TEXTS),
    "bare": lambda t: t(TEXTS, add_special_tokens=False),
    "pair": lambda t: t(TEXTS[0], TEXTS[3]),
    "pairs": lambda t: t(TEXTS[:2], TEXTS[2:]),
    "padded": lambda t: t(TEXTS, padding=True),
    "padded tensors": lambda t: t(TEXTS, padding="longest", return_tensors="pt"),
    "padded arrays": lambda t: t(TEXTS, padding=True, return_tensors="np", pad_to_multiple_of=8),
    "truncated": lambda t: t(TEXTS, truncation=True, max_length=5),
    "to its maximum": lambda t: t(TEXTS, truncation=True),
    "a truncated pair": lambda t: t(TEXTS[3], TEXTS[0], truncation="only_first", max_length=20),
    "both": lambda t: t(TEXTS, truncation=True, max_length=7, padding="max_length", return_tensors="pt"),
    "other side": lambda t: t(TEXTS, padding=True, padding_side="left"),
    "more": lambda t: t(TEXTS, return_token_type_ids=True, return_attention_mask=False, return_length=True),
    "offsets": lambda t: t(TEXTS[0], return_offsets_mapping=True),
    "encode": lambda t: t.encode(TEXTS[0]),
    "encode bare": lambda t: t.encode(TEXTS[1], add_special_tokens=False),
    "encode tensor": lambda t: t.encode(TEXTS[0], return_tensors="pt"),
    "tokenize": lambda t: t.tokenize(TEXTS[1]),
    "decode": lambda t: [t.decode(t.encode(text)) for text in TEXTS],
    "decode skipping": lambda t: t.decode(t.encode(TEXTS[1]), skip_special_tokens=True),
    "decode a tensor": lambda t: t.decode(torch.tensor(t.encode(TEXTS[0]))),
    "decode one": lambda t: t.decode(5),
    "decode several": lambda t: t.decode([[5, 6], [7]]),
    "batch decode": lambda t: t.batch_decode([t.encode(text) for text in TEXTS], skip_special_tokens=True),
    "no cleaning": lambda t: t.decode(t.encode("don't ."), clean_up_tokenization_spaces=False),
    "vocabulary": lambda t: (len(t), t.vocab_size, t.get_vocab() == t.vocab, sorted(t.get_vocab().items())),
    "added": lambda t: t.get_added_vocab(),
    "ids": lambda t: (t.convert_tokens_to_ids("h"), t.convert_tokens_to_ids(["[CLS]", "nowhere"])),
    "tokens": lambda t: (t.convert_ids_to_tokens(7), t.convert_ids_to_tokens([2, 7, 3], skip_special_tokens=True)),
    "string": lambda t: t.convert_tokens_to_string(t.tokenize(TEXTS[0])),
    "special": lambda t: (t.special_tokens_map, t.all_special_tokens, t.all_special_ids),
    "each": lambda t: [getattr(t, f"{n}_token{e}") for n in ("bos", "eos", "pad", "unk", "cls") for e in ("", "_id")],
    "settings": lambda t: (t.padding_side, t.truncation_side, t.model_max_length, t.model_input_names, t.is_fast),
    "num special": lambda t: (t.num_special_tokens_to_add(), t.num_special_tokens_to_add(pair=True)),
    "name": lambda t: (t.name_or_path, t.chat_template, bool(t)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_a_call_gives_what_transformers_gives(pair, name):
    ours, theirs = (CALLS[name](tokenizer) for tokenizer in pair)
    assert same(ours, theirs), f"{ours}\n{theirs}"


CHAT = [{"role": "user", "content": "Hi <|im_end|>"}, {"role": "assistant", "content": "Yes"}]
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ x }}"
CHATS = {
    "text": dict(tokenize=False),
    "prompt": dict(tokenize=False, add_generation_prompt=True),
    "continued": dict(tokenize=False, continue_final_message=True),
    "ids": dict(tokenize=True, add_generation_prompt=True),
    "list": dict(return_dict=False),
    "tensors": dict(return_tensors="pt"),
    "truncated": dict(truncation=True, max_length=9),
    "another template": dict(chat_template=PLAIN, tokenize=False, x="y"),
}


@pytest.mark.parametrize("name", CHATS)
def test_chat_templates(pair, name):
    if pair[1].chat_template is None and name != "another template":
        pytest.skip("this tokenizer has no chat template")
    ours, theirs = (tokenizer.apply_chat_template(CHAT, **CHATS[name]) for tokenizer in pair)
    assert same(ours, theirs)
    ours, theirs = (
        tokenizer.apply_chat_template([CHAT, CHAT[:1]], **CHATS[name] | {"padding": True}) for tokenizer in pair
    )
    assert same(ours, theirs)


def test_a_special_token_can_be_set(pair):
    for tokenizer in pair:
        before, number = tokenizer.pad_token, tokenizer.convert_tokens_to_ids("a")
        tokenizer.pad_token = "a"
        assert (tokenizer.pad_token_id, tokenizer("a", padding="max_length", max_length=7).input_ids.count(number)) == (
            number, 7 - tokenizer.num_special_tokens_to_add()
        )  # fmt: skip
        tokenizer.pad_token = before
    ours = pair[0]
    ours.eos_token_id = number
    assert ours.eos_token == "a"
    ours.eos_token = pair[1].eos_token
    with pytest.raises(InvalidParams, match="no token 'nowhere'"):
        ours.pad_token = "nowhere"


def test_wrong_arguments_are_refused_by_name(pair):
    tokenizer = pair[0]
    for wrong, text in (
        (dict(stride=3), "no argument stride"),
        (dict(padding="wide"), "padding is 'wide'"),
        (dict(truncation="some"), "truncation is 'some'"),
        (dict(return_tensors="tf"), "return_tensors is 'tf'"),
        (dict(return_tensors="pt"), "set padding=True"),
    ):
        with pytest.raises(InvalidParams, match=text):
            tokenizer(TEXTS, **wrong)
    assert tokenizer("a", stride=0, verbose=True, is_split_into_words=False)
    with pytest.raises(AttributeError, match="save_pretrained"):
        tokenizer.save_pretrained("x")


def test_the_tokenizer_of_the_library(tmp_path):
    folder = write_words(tmp_path / "words") or tmp_path / "words"
    theirs = ScriptTokenizer(Tokenizer.load(folder), str(folder)).to_transformers()
    assert isinstance(theirs, transformers.PreTrainedTokenizerBase) and theirs("hello there")["input_ids"] == [
        2,
        5,
        6,
        3,
    ]
    alone = ScriptTokenizer(Tokenizer.load(folder), str(folder / "tokenizer.json")).to_transformers()
    assert alone("hello there")["input_ids"] == [2, 5, 6, 3]
