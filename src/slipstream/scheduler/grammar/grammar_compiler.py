"""GrammarCompiler: makes matchers of the specifications of structured output, by llguidance.

Importing this takes 30 ms, so the first compilation does it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from slipstream.base.errors import InvalidParams
from slipstream.config.buffer_size import mask_words
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar import pool_library
from slipstream.scheduler.grammar.checker import GrammarChecker, GrammarTooComplex
from slipstream.scheduler.grammar.compiled import CompiledGrammar, Matcher
from slipstream.scheduler.grammar.lark_nodes import BadGrammar
from slipstream.scheduler.grammar.llguidance_library import llguidance_library
from slipstream.scheduler.grammar.native_matcher import NativeVocabulary
from slipstream.scheduler.grammar.schema_nodes import SchemaNodes, schema_nodes
from slipstream.scheduler.grammar.translate import translate
from slipstream.text.grammar_vocab import GrammarVocabulary, grammar_vocabulary
from slipstream.text.tokenizer import Tokenizer

MAX_SPARES = 64  # matchers of ended sessions that a grammar keeps
_MAX_ERROR_CHARS = 500


class GrammarCompiler:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: of the model."""
        self.vocab_size = vocab_size
        # that can run the matchers
        self.threads: ctypes.CDLL | None = pool_library.load() if llguidance_library() is not None else None
        # ids of special tokens by their text
        self._special_tokens = {text: token for token in tokenizer.special_ids if (text := tokenizer.piece(token))}
        self._new_matcher = self._matcher_maker(tokenizer)

    def compile(
        self, params: StructuredOutputsParams, checker: GrammarChecker, is_wanted: Callable[[], bool]
    ) -> CompiledGrammar:
        """`is_wanted`: whether a request waits for it."""
        try:
            grammar = translate(params, self._special_tokens)
            error = checker.check(grammar, is_wanted)
            if not error:
                matcher = self._new_matcher(grammar, schema_nodes(params, grammar))
                if not (error := matcher.get_error()):
                    mask = np.zeros(mask_words(self.vocab_size), np.uint32)
                    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)  # the first one is the slowest
                    error = matcher.get_error()  # that no text matches is found by the first mask
                if not error:
                    return CompiledGrammar(matcher, 0 if self.threads is None else MAX_SPARES)
        except (BadGrammar, GrammarTooComplex) as failure:
            error = str(failure)
        error = error.replace("<non-verbose/>", "").strip()
        if error.startswith("NoExtension"):
            error = "no text matches it, as with a rule or $ref that leads only to itself"
        if len(error) > _MAX_ERROR_CHARS:
            error = error[:_MAX_ERROR_CHARS] + " ..."
        raise InvalidParams(f"structured_outputs cannot be used: {error}", param="structured_outputs")

    def _matcher_maker(self, tokenizer: Tokenizer) -> Callable[[str, SchemaNodes | None], Matcher]:
        if self.threads is not None:
            return NativeVocabulary(GrammarVocabulary(tokenizer, self.vocab_size), self.threads).compile
        vocabulary, limits = grammar_vocabulary(tokenizer, self.vocab_size), LLParserLimits(verbose_errors=False)
        return lambda grammar, _: LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
