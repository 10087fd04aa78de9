import random
from functools import cache
from itertools import product

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from slipstream.text.excerpt import Pieces, _share
from slipstream.text.tokenizer import Tokenizer

WORDS = ["[UNK]", "[CLS]", "[SEP]", "the", "cat", "sat", "on", "a", "mat", "run", "##s", "##ning", ".", ","]


def wordpiece() -> Backend:
    backend = Backend(models.WordPiece({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return backend


class Counting(Tokenizer):
    """Counts the characters that the library was given to read."""

    read = 0

    def encodings(self, texts, add_special_tokens=True, **how):
        self.read += sum(len(part) for text in texts for part in ([text] if isinstance(text, str) else text))
        return super().encodings(texts, add_special_tokens, **how)


@pytest.fixture
def pieces():
    return Pieces(Counting(wordpiece()))


def sentence(rng, size):
    return " ".join(
        rng.choice(["the", "cat", "sat", "on", "a", "mat", "runs", "running", ".", ","]) for _ in range(size)
    )


@cache
def truncating(limit):
    backend = wordpiece()
    backend.enable_truncation(limit)
    return backend


def library_cut(text, limit, pair=None):
    """What the library itself makes of it."""
    backend = truncating(limit)
    encoding = backend.encode(text) if pair is None else backend.encode(text, pair)
    return encoding.ids, encoding.type_ids


def test_cut_texts_are_what_the_library_makes_of_them(pieces):
    rng = random.Random(0)
    texts = [sentence(rng, size) for size in (1, 3, 9, 10, 11, 40, 400, 4000)]
    for limit in (3, 8, 11, 64):
        assert pieces.texts(texts, limit) == [library_cut(text, limit)[0] for text in texts]
    assert pieces.texts(texts, None) == [wordpiece().encode(text).ids for text in texts]


@pytest.mark.parametrize("mark", ["\x0b", "\x0c", "\x1c", "\x1f", "\x85", "\xa0", "\u3000", "\n"])
def test_a_text_is_not_cut_where_the_model_sees_one_word(pieces, mark):
    """Some characters that Python takes for spaces are left out of a text, and what they part is one word then."""
    text = "z" * 120 + " run" + "s" * 60 + mark + "s" * 900  # of over 100 characters a word is unknown, whatever it is
    assert pieces.texts([text], 12) == [library_cut(text, 12)[0]]


def test_a_cut_text_keeps_the_tokens_that_begin_and_end_it(pieces):
    (ids,) = pieces.texts(["the cat sat on a mat"], 5)
    assert [WORDS[i] for i in ids] == ["[CLS]", "the", "cat", "sat", "[SEP]"]


def test_less_room_than_special_tokens(pieces):
    assert pieces.texts(["the cat"], 1) == [[1]]


def test_no_more_of_a_long_text_is_read_than_needed(pieces):
    text = sentence(random.Random(1), 100_000)
    pieces.tokenizer.read = 0
    assert pieces.texts([text], 16) == [library_cut(text, 16)[0]]
    assert pieces.tokenizer.read < 2_000 < len(text)
    pieces.tokenizer.read = 0
    pieces.pairs([(text, text)], 16)
    assert pieces.tokenizer.read < 6_000


IDEOGRAPHS = "中文文本没有空格，也不需要。"


@pytest.mark.parametrize(
    "text",
    ["the\ncat\tsat\u3000on\n\n" * 2_000, IDEOGRAPHS * 2_000, "cat." * 6_000, ("the" + IDEOGRAPHS) * 2_000],
    ids=["lines", "ideographs", "points", "both"],
)
def test_texts_without_spaces_are_read_no_further_where_words_are_seen_to_end(pieces, text):
    assert len(text) > 22_000  # more than any of the bounds below
    for limit in (3, 16, 200):
        pieces.tokenizer.read = 0
        assert pieces.texts([text], limit) == [library_cut(text, limit)[0]]
        assert pieces.tokenizer.read < 40 * (limit + 32)
        pieces.tokenizer.read = 0
        assert pieces.pairs([("the cat", text)], limit + 9) == [(ids := library_cut("the cat", limit + 9, text)[0], 4)]
        assert len(ids) == limit + 9 and pieces.tokenizer.read < 80 * (limit + 32)


def test_a_word_cut_in_two_counts_for_nothing(pieces):
    """All of it is unknown, and what was read of it is not."""
    before = ("x" * 12 + ".") * 96 + ("x" * 33 + ".") * 2 + "."
    text = before + "run" + "ning" * 20 + "q" + "?" * 9_000
    read = text[: 6 * (200 + 32)]
    assert read.endswith("ning") and len(wordpiece().encode(read).ids) > 200 + 16
    assert pieces.texts([text], 200) == [library_cut(text, 200)[0]]


@pytest.mark.parametrize("seed", range(8))
def test_any_text_has_the_tokens_that_it_has_when_read_whole(pieces, seed):
    """Of any letters, words, ends of lines and marks, by tokenizers that see words in it and by one that sees none."""
    rng = random.Random(seed)
    parts = ["the", "cat", " ", "\n", "中", "。", ",", "runs", "x" * 150, "\u3000", "é", "e\u0301", " \n ", "running"]
    text = "".join(rng.choice(parts) for _ in range(3_000))
    for backend in (wordpiece(), bytewise(True), bytewise(False)):
        own = Pieces(Tokenizer(backend))
        whole = backend.encode(text, add_special_tokens=False).ids
        num = backend.num_special_tokens_to_add(is_pair=False)
        for limit in (4, 30, 300):
            (found,) = own.texts([text], limit)
            assert len(found) == limit
            assert found[num // 2 : limit - num // 2] == whole[: limit - num]


def bytewise(split: bool) -> Backend:
    """Bytes that join into pairs; where it splits, only inside of a word or of a row of marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("c", "a"), ("Ġ", "t"), (",", ","), ("ä", "¸"), ("ä¸", "Ń"), ("Ċ", "Ġ")]
    vocabulary = {token: i for i, token in enumerate([*alphabet, *(a + b for a, b in merges)])}
    backend = Backend(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    return backend


def test_long_words_and_texts_without_spaces_are_read_as_far_as_needed(pieces):
    rare = ("x" * 90 + " ") * 300  # each of them is one unknown word
    solid = "cat" * 2_000  # nowhere to stop reading
    for text in (rare, solid, " " * 3_000 + "the cat"):
        assert pieces.texts([text], 12) == [library_cut(text, 12)[0]]


def test_pairs_and_where_the_second_text_begins(pieces):
    (ids, start), = pieces.pairs([("the cat", "sat on a mat")], None)  # fmt: skip
    assert [WORDS[i] for i in ids] == ["[CLS]", "the", "cat", "[SEP]", "sat", "on", "a", "mat", "[SEP]"]
    assert start == 4


def test_cut_pairs_are_what_the_library_makes_of_them(pieces):
    rng = random.Random(2)
    sizes = (1, 4, 5, 9, 30, 300)  # the library takes time by the product of the lengths
    pairs = [(sentence(rng, a), sentence(rng, b)) for a, b in product(sizes, sizes)]
    backend = wordpiece()
    shorter = [min(len(backend.encode(text, add_special_tokens=False).ids) for text in pair) for pair in pairs]
    for limit in (8, 9, 20):
        found = pieces.pairs(pairs, limit)
        for (first, second), num, (ids, start) in zip(pairs, shorter, found, strict=True):
            expected, types = library_cut(first, limit, second)
            if num >= limit - 3:
                # the odd token goes to the longer of two long texts there; to know which it is takes reading both
                assert len(ids) == len(expected) == limit and ids[:2] == expected[:2]
                continue
            assert ids == expected
            assert [0] * start + [1] * (len(ids) - start) == types


def test_a_model_without_types_has_no_second_beginning():
    backend = wordpiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] [SEP] $B [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    ((ids, start),) = Pieces(Tokenizer(backend)).pairs([("the", "cat")], None)
    assert start is None and len(ids) == 6


@pytest.mark.parametrize("room", range(12))
def test_shares_fill_the_room(room):
    for first, second in product(range(9), range(9)):
        a, b = _share(first, second, room)
        assert a <= first and b <= second and a + b == min(room, first + second)


def test_texts_and_pairs_cut_on_the_left_are_the_librarys(pieces):
    rng, num_alike = random.Random(3), 0
    for limit, size in product((1, 2, 3, 5, 9), (1, 4, 9, 30)):
        text, other = sentence(rng, size), sentence(rng, size + 2)
        backend = wordpiece()
        whole = backend.encode(text).ids
        (found,) = pieces.texts([text], limit, side="left")
        assert len(found) <= limit
        if len(whole) > limit > 2:
            backend.enable_truncation(limit, direction="left")
            assert found == backend.encode(text).ids
        backend.enable_truncation(max(limit, 4), direction="left")
        wanted = backend.encode(text, other)
        ((ids, begin),) = pieces.pairs([(text, other)], max(limit, 4), side="left")
        assert len(ids) == len(wanted.ids)
        # how many each keeps is ours to say where both are long; which ones is not
        types = [0 if begin is None or place < begin else 1 for place in range(len(ids))]
        if types == wanted.type_ids:
            num_alike += 1
            assert ids == wanted.ids
    assert num_alike > 10
