"""ServedModel: one model as a front end sees it, and which of several is meant."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from slipstream.engine.model_description import ModelDescription
from slipstream.errors import InvalidParams, ModelNotFound
from slipstream.frontend.inputs import InputProcessor
from slipstream.frontend.pool_inputs import PoolInputs
from slipstream.params import check_text
from slipstream.text.tokenizer import Tokenizer


class ServedModel(msgspec.Struct, frozen=True):
    facts: ModelDescription
    tokenizer: Tokenizer | None
    inputs: InputProcessor
    pool_inputs: PoolInputs | None = None  # None: it only generates

    @classmethod
    def load(cls, facts: ModelDescription) -> ServedModel:
        """Reads the tokenizer, which may take a second."""
        return cls.of(facts, facts.load_tokenizer())

    @classmethod
    def of(cls, facts: ModelDescription, tokenizer: Tokenizer | None) -> ServedModel:
        pool_inputs = None if facts.pooling is None else PoolInputs(facts, tokenizer)
        return cls(facts, tokenizer, InputProcessor(facts, tokenizer), pool_inputs)

    def can(self, task: str) -> bool:
        """`task`: generate, score, or one of pooling's."""
        pooling = self.facts.pooling
        if pooling is None or task == "generate":
            return task == "generate" and self.facts.generates
        if task == "score":
            return "classify" in pooling.tasks and pooling.num_labels == 1
        return task in pooling.tasks

    @property
    def max_num_tokens(self) -> int:
        """Of a text: what the model was made to read, where it only pools and its files say so; else its length."""
        pooling, most = self.facts.pooling, self.facts.max_model_len
        if pooling is None or pooling.generates or pooling.max_seq_length is None:
            return most
        return min(most, pooling.max_seq_length)

    def require_pooling(self) -> PoolInputs:
        """For a call that wants numbers of it."""
        if self.pool_inputs is None:
            raise InvalidParams(f"{self.facts.name} only generates; choose a model that makes vectors or scores")
        return self.pool_inputs


def choose(models: Mapping[str, ServedModel], name: str | None, *tasks: str) -> ServedModel:
    """The model of that name. Without one the first that is made for the task, else the first that can do it.

    Of several tasks the first counts most. Where no model can, it is the first of all, which says so itself.
    """
    if name is not None:
        check_text("model", name)
    if name:
        if name not in models:
            raise ModelNotFound(f"there is no model {name!r} here; there is {', '.join(models) or 'none yet'}")
        return models[name]
    if not models:
        raise ModelNotFound("there is no model here yet; wait until the engine is ready")
    for task in tasks:
        able = [model for model in models.values() if model.can(task)]
        # any model that continues text can also embed it, but not as well as one that does nothing else
        made_for_it = [model for model in able if task == "generate" or not model.can("generate")]
        if able:
            return (made_for_it or able)[0]
    return next(iter(models.values()))


POOLING_TASKS = ("embed", "classify", "token_embed", "token_classify", "sparse")
SCORING = ("score", "embed", "token_embed")
"""Tasks that make scores of pairs, the best first."""
