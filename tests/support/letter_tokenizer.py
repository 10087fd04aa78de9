"""A tokenizer for the scripted device: the printable ASCII characters, a newline and an end token."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from mask_table import OpenMasks
from scripted_tokens import VOCAB
from slipstream.config.buffer_size import mask_words
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.constraints import Constraints
from slipstream.scheduler.grammar.grammars import Grammars
from slipstream.scheduler.grammar.native_matcher import grammar_vocabulary
from slipstream.scheduler.grammar.translate import translate

END = VOCAB - 1


class LetterTokenizer:
    vocab_size = VOCAB
    special_ids = frozenset({END})

    def bytes_of(self, token: int) -> bytes:
        return b"<end>" if token == END else b"\n" if token == END - 1 else bytes([token + 32])

    def piece(self, token: int) -> str:
        return self.bytes_of(token).decode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [END - 1 if letter == "\n" else ord(letter) - 32 for letter in text if letter == "\n" or letter >= " "]

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.bytes_of(token) for token in tokens if token != END).decode()


TOKENIZER = LetterTokenizer()
_VOCABULARY = grammar_vocabulary(TOKENIZER, VOCAB)  # type: ignore[arg-type]


def make_constraints(max_rows: int = 8) -> Constraints:
    """Without a limit for masks: on a busy machine any thread may be late."""
    grammars = Grammars(lambda: TOKENIZER, VOCAB)  # type: ignore[arg-type,return-value]
    constraints = Constraints(grammars, max_rows, open_masks=OpenMasks(mask_words(VOCAB)))
    constraints.min_budget = 60.0
    return constraints


def oracle_matcher(params: StructuredOutputsParams) -> LLMatcher:
    """A matcher that nothing of ours has touched."""
    return LLMatcher(_VOCABULARY, translate(params, {"<end>": END}))
