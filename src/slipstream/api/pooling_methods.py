"""PoolingMethods: embed, classify, score, rerank and encode of `LLM`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from slipstream.base.log import progress
from slipstream.base.processes import frozen_gc
from slipstream.front import pooling_calls
from slipstream.front.pooling_calls import OneOrMoreParams, OneOrMorePrompts, Texts
from slipstream.front.pooling_inputs import PoolingPrompts
from slipstream.front.pooling_results import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    RerankResult,
    ScoringRequestOutput,
    as_plain,
)
from slipstream.front.served import POOLING_TASKS, SCORING, ServedModel
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import PoolingParams, Task

T = TypeVar("T")


class PoolingMethods:
    """A base class of `LLM`."""

    _sync_loop: Any

    if TYPE_CHECKING:

        def _model(self, name: str | None, *tasks: str) -> ServedModel: ...
        def _new_id(self) -> str: ...

    def encode(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        pooling_task: Task | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **how: Any,
    ) -> list[PoolingRequestOutput[Any]]:
        """Runs any pooling task for each prompt: embed, classify, token_embed, token_classify or sparse.

        `outputs.data` is a torch tensor; for sparse, `outputs` has indices and weights.
        A prompt is a text, token ids, an object with `prompt` or `prompt_token_ids`, or a pair of texts. `how`:
        prompt_name or prompt (the text to put before each input), truncate_prompt_tokens, and tokenization_kwargs with
        truncate_prompt_tokens and truncation_side.
        """
        served = self._model(model, *([pooling_task] if pooling_task else POOLING_TASKS))
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, pooling_task, **how)
        return [as_plain(one) for one in self._pool(served, call, use_tqdm, lora_request)]

    def embed(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **how: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Embeds each prompt: `outputs.embedding` is a list, `outputs.data` an array. `how`: see `encode`."""
        served = self._model(model, "embed")
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, "embed", **how)
        return self._pool(served, call, use_tqdm, lora_request)

    def classify(
        self,
        prompts: OneOrMorePrompts,
        pooling_params: OneOrMoreParams = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **how: Any,
    ) -> list[ClassificationRequestOutput]:
        """Classifies each prompt: `outputs.probs` by class, and `outputs.label` of the most likely class."""
        served = self._model(model, "classify")
        call = pooling_calls.encode(served.require_pooling(), prompts, pooling_params, "classify", **how)
        return self._pool(served, call, use_tqdm, lora_request)

    def score(
        self,
        data_1: Texts,
        data_2: Texts,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **how: Any,
    ) -> list[ScoringRequestOutput]:
        """Scores pairs of texts as `outputs.score`: one with one, one with each of many, or the i-th with the i-th.

        `how`: instruction (where the model takes one), prompt_name, truncate_prompt_tokens, tokenization_kwargs (see
        `encode`), and chat_template: a Jinja template for the prompt of a cross-encoder, with the texts as messages of
        the roles query and document.
        """
        served = self._model(model, *SCORING)
        call = pooling_calls.score(served.require_pooling(), data_1, data_2, pooling_params, **how)
        return self._pool(served, call, use_tqdm, lora_request)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
        model: str | None = None,
        **how: Any,
    ) -> list[RerankResult]:
        """Returns the documents by descending relevance, with index, score and text. `how`: see `score`."""
        served = self._model(model, *SCORING)
        call = pooling_calls.rerank(served.require_pooling(), query, documents, pooling_params, top_n=top_n, **how)
        return self._pool(served, call, use_tqdm, lora_request)

    def _pool(
        self,
        served: ServedModel,
        call: pooling_calls.PoolingCall[T],
        use_tqdm: bool,
        lora_request: LoRARequest | None = None,
    ) -> T:
        """Runs a pooling call: its batches, until it returns."""
        self._sync_loop.check_open()
        try:
            batches = next(call)
            with progress(sum(batch.num_of_call for batch in batches), "prompts", use_tqdm) as advance:
                while True:
                    source = PoolingPrompts(
                        served.require_pooling(),
                        batches,
                        self._new_id,
                        as_lists=self._sync_loop.as_lists,
                        lora_request=lora_request or served.lora,
                    )
                    with self._sync_loop.turn(), frozen_gc():
                        states = self._sync_loop.run(
                            served, source, lambda state: advance(state.num_tokens), follows=source.has_one_priority
                        )
                        results = source.in_order([state.result() for state in states])
                    batches = call.send(results)
        except StopIteration as end:
            result: T = end.value
            return result
