"""Masks of states that were seen before are those of a matcher that has taken the same tokens."""

from __future__ import annotations

import random

import numpy as np
import pytest
from llguidance import LLMatcher

from mask_table import MaskTable, OpenMasks
from slipstream.params.structured import StructuredOutputsParams as Shape
from slipstream.scheduler.grammar import mask_pool
from slipstream.scheduler.grammar.mask_pool import MaskBatch, MaskPool
from slipstream.scheduler.grammar.native_matcher import GrammarVocabulary, NativeVocabulary, grammar_vocabulary
from slipstream.scheduler.grammar.schema_nodes import schema_nodes
from slipstream.scheduler.grammar.session import CompiledGrammar, Session
from slipstream.scheduler.grammar.translate import translate

pytestmark = pytest.mark.skipif(mask_pool.load() is None, reason="no C compiler")

TAGGED = {
    "anyOf": [
        {"type": "object", "properties": {"k": {"const": kind}, kind: {"type": "string"}}, "required": ["k", kind]}
        for kind in ("a", "b")
    ]
}
SCHEMAS = [
    {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 6}, "minItems": 3},
    {
        "type": "object",
        "properties": {
            "a": {"type": "string"},
            "b": {"anyOf": [{"type": "string", "maxLength": 3}, {"type": "null"}]},
            "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "é": {"enum": ["a", "ab"]},
        },
        "required": ["a"],
    },
    {
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "minimum": -5, "maximum": 100},
                    "b": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "minItems": 1, "maxItems": 2},
                },
                "required": ["a"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/tree",
    },
    {"type": "array", "items": TAGGED},
    {"type": "object", "additionalProperties": {"type": "string", "pattern": "^[ab]{2,4}$"}},
    {"type": "string", "maxLength": 5},
    {},
]
SHAPES = [Shape(json=schema, disable_any_whitespace=bool(number % 2)) for number, schema in enumerate(SCHEMAS)]


class WordTokenizer:
    """Pieces of JSON, some of several tokens of JSON, and bytes of characters."""

    tokens = [bytes([byte]) for byte in (2, *range(32, 127))] + [
        *(
            b"\n",
            b"\xc3",
            b"\xa9",
            b"\xc3\xa9",
            b"\xe2\x82",
            b"\xac",
            b'"a',
            b'",',
            b'":',
            b'": "',
            b'","',
            b'"}',
            b'"]',
        ),
        *(
            b"],",
            b"},",
            b"[[",
            b"[{",
            b'{"',
            b"ab",
            b"abab",
            b"  ",
            b"\n ",
            b", ",
            b"\\n",
            b'\\"',
            b"\\u00",
            b"true",
            b"12",
        ),
    ]
    vocab_size = len(tokens)
    special_ids = frozenset()

    def bytes_of(self, token):
        return self.tokens[token]

    def encode(self, text, add_special_tokens=True):
        return [self.tokens.index(bytes([byte])) for byte in text.encode()]


TOKENIZER = WordTokenizer()
SIZE = TOKENIZER.vocab_size
WORDS = (SIZE + 32) // 32


@pytest.mark.every_second("max_masks", "keeps")
@pytest.mark.parametrize("max_masks", [0, 8], ids=["much room", "little room"])
@pytest.mark.parametrize("keeps", [False, True], ids=["written", "kept by the device"])
def test_masks_of_states_seen_before_are_those_of_an_untouched_matcher(keeps, max_masks):
    rng, table = random.Random(0), MaskTable()
    vocabulary = NativeVocabulary(GrammarVocabulary(TOKENIZER, SIZE), mask_pool.load())  # type: ignore[arg-type]
    oracle = grammar_vocabulary(TOKENIZER, SIZE)  # type: ignore[arg-type]
    pool = MaskPool(mask_pool.load(), WORDS, SIZE, 16, num_threads=2, max_masks=max_masks)
    for shape in SHAPES:
        grammar = translate(shape, {})
        compiled = CompiledGrammar(vocabulary.compile(grammar, schema_nodes(shape, grammar)))
        num_found = pool.num_found
        for _ in range(2):
            sessions = [Session(compiled, [], 0, [], SIZE) for _ in range(12)]
            walk(rng, pool, sessions, [LLMatcher(oracle, grammar) for _ in sessions], table, keeps)
        assert pool.num_found > num_found + (1 if max_masks else 20), shape
    if keeps:
        assert table.num_sent < (0.98 if max_masks else 0.8) * table.num_masks
    pool.close()


def walk(rng, pool, sessions, matchers, table, keeps):
    """Take random tokens that are allowed, and compare each mask."""
    tokens, open_masks = [-1] * len(sessions), OpenMasks(WORDS)
    for _ in range(30):
        rows = [row for row, session in enumerate(sessions) if not session.is_complete]
        if not rows:
            return
        masks = open_masks(len(sessions))
        for row in set(range(len(sessions))) - set(rows):
            masks.entries[row] = masks.targets[row] = -1
        batch = MaskBatch()
        for row in rows:
            batch.add(sessions[row], tokens[row], row)
        pool.start(batch, masks, keeps=keeps)
        pool.wait(masks.bits.view(np.uint32), 60.0)
        pool.send(masks if keeps else None)
        bits = (table.bits_of(masks) if keeps else masks.bits).view(np.uint32)
        for row in rows:
            session, matcher = sessions[row], matchers[row]
            if session.is_complete:
                assert matcher.is_stopped()
                continue
            assert session.forced == matcher.compute_ff_tokens()
            if not session.forced:
                assert bits[row].tobytes() == matcher.compute_bitmask(), session.num_taken
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            choices = [token for token in allowed.tolist() if token < SIZE]
            if not choices:
                session.is_complete = True  # only the end is possible
                continue
            if len(session.forced) > 1:  # all but the last are appended, not drawn
                *appended, tokens[row] = session.forced
                session.take(appended)
                matcher.consume_tokens(appended)
            else:
                tokens[row] = rng.choice(choices)
            matcher.consume_token(tokens[row])
