"""PoolingInputs: builds the prompts of one pooling model. PoolingPrompts: turns them into messages, and orders results.

A model may have been trained with text around its inputs: a prompt before each text (`prefix`), a marker token of late
interaction (`role`), or a template for pairs of texts (`pair`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from slipstream.base.errors import InvalidParams, InvalidPrompt
from slipstream.checkpoint.pooling_info import PoolingInfo, Role
from slipstream.contracts.messages import Submit
from slipstream.engine.model_description import ModelDescription
from slipstream.front.inputs import PreparedPrompt
from slipstream.front.pooling_prompts import (
    NO_ROLE,
    EncodedPrompt,
    PoolingBatch,
    PoolingPrompt,
    PoolingPromptReader,
    with_skipped_tokens,
)
from slipstream.front.pooling_results import PoolingRequestOutput, num_result_bytes
from slipstream.front.prompts import Lookahead
from slipstream.params.lora import LoRARequest
from slipstream.params.pooling import TASKS, PoolingParams, Task
from slipstream.text.chat_template import render_chat
from slipstream.text.control_tokens import ControlTokens

_FIRST_PART, _MAX_PART = 64, 1024  # prompts tokenised at a time: few at first, so that the first step starts early
_MAX_IDS_PART = 256  # prompts of token ids checked at a time: no thread does this, so a step may wait for a part


class PoolingInputs(PoolingPromptReader):
    """Resolves parameters and builds prompts for one model."""

    _pair_controls: ControlTokens | None = None  # built at first use

    def resolve(self, params: PoolingParams | None, task: Task | None = None) -> PoolingParams:
        """Returns parameters with a task. Raises if the model cannot do what they say."""
        return resolve_params(params, task, self.pooling, self.description)

    def prefix(self, prompt_name: str | None, prompt: str | None = None) -> str:
        """Returns the text to put before each input: `prompt`, the model's prompt of that name, or its default one."""
        if prompt is not None:
            if prompt_name is not None:
                raise InvalidParams("prompt and prompt_name are both given; remove one of them")
            if not isinstance(prompt, str):
                raise InvalidParams(f"prompt is {prompt!r}; give the text to put before each input, or a prompt_name")
            return prompt
        prompts, name = self.pooling.prompts, prompt_name
        if name is None:
            name = self.pooling.default_prompt_name
        if name is None or (name in ("query", "document") and self.pooling.late_interaction and name not in prompts):
            return ""
        if name not in prompts:
            known = ", ".join(prompts) or "none"
            raise InvalidParams(f"{self.description.name} has no prompt {name!r}; it has {known}", param="prompt_name")
        return prompts[name]

    def after_prefix(self, params: PoolingParams, prefix: str) -> PoolingParams:
        """Parameters for a text after this prefix, whose tokens the model may leave out of pooling."""
        if not prefix or self.pooling.include_prompt:
            return params
        return with_skipped_tokens(params, self.prefix_length(prefix))

    def role(self, prompt_name: str | None) -> Role:
        """The role of a text in late interaction (query or document), by the name of its prompt."""
        if not self.pooling.late_interaction or prompt_name not in ("query", "document"):
            return NO_ROLE
        return self.pooling.query if prompt_name == "query" else self.pooling.document

    def pair_prompt(self, prompt_name: str | None, instruction: str | None) -> tuple[str, str | None]:
        """Returns the prefix of the first text of a pair, and the instruction.

        For a model with a template for pairs, the prompt of that name is the instruction.
        """
        if self.pooling.pair_template is None:
            return self.prefix(prompt_name), instruction
        if prompt_name is None:
            return "", instruction
        if instruction is not None:
            raise InvalidParams("instruction and prompt_name are both given; remove one of them", param="prompt_name")
        return "", self.prefix(prompt_name)

    def pair(
        self, query: str, document: str, instruction: str | None, chat_template: str | None = None
    ) -> PoolingPrompt:
        """Returns two texts as one prompt, in the format of the model's training, or by a Jinja template.

        Control tokens in the texts are encoded as plain text, unless the engine's option allows them.
        """
        for text in (query, document):
            if not isinstance(text, str):
                raise InvalidPrompt(f"score compares texts, and one is {type(text).__name__}; give texts")
        if chat_template is not None:
            return self._templated_pair(query, document, instruction, chat_template)
        template = self.pooling.pair_template
        if template is None:
            if instruction is not None:
                raise InvalidParams(f"{self.description.name} takes no instruction; remove it", param="instruction")
            return query, document
        instruction = self.pooling.instruction if instruction is None else instruction
        parts = {"{instruction}": instruction, "{query}": query, "{document}": document}
        controls = self._controls()
        if controls is not None:
            parts = {name: controls.mask(part) for name, part in parts.items()}
        # one pass from left to right, so that braces in the texts are not replaced
        text, rest = "", template
        while rest:
            offsets = [(rest.find(name), name) for name in parts if name in rest]
            offset, name = min(offsets, default=(len(rest), ""))
            text += rest[:offset] + (parts[name] if name else "")
            rest = rest[offset + len(name) :]
        return text if controls is None else controls.unmask(text)

    def _templated_pair(self, query: str, document: str, instruction: str | None, template: str) -> str:
        if self.tokenizer is None:
            raise InvalidPrompt("the prompt is text and `skip_tokenizer_init=True` is set; give token ids or unset it")
        controls = None if self.description.allow_control_tokens else ControlTokens(self.tokenizer, template)
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        variables: dict[str, Any] = {} if instruction is None else {"instruction": instruction}
        return render_chat(
            template,
            messages,
            add_generation_prompt=False,
            special_tokens=self.tokenizer.special_tokens,
            controls=controls,
            **variables,
        )

    def _controls(self) -> ControlTokens | None:
        """The control tokens that the pair template may contain and the texts may not; None allows all in both."""
        template = self.pooling.pair_template
        if self.tokenizer is None or template is None or self.description.allow_control_tokens:
            return None
        if self._pair_controls is None:
            self._pair_controls = ControlTokens(self.tokenizer, template)
        return self._pair_controls

    def prepare(self, batches: Sequence[PoolingBatch]) -> Lookahead[tuple[PoolingBatch, slice], EncodedPrompt]:
        """Returns an iterator over the prompts, batch by batch and part by part, sorted by length within a part."""
        encodes = sum(len(batch.prompts) for batch in batches) > _FIRST_PART and any(
            isinstance(batch.prompts[0], str | tuple | Mapping) for batch in batches
        )
        parts = []
        for batch in batches:
            start, size = 0, _FIRST_PART
            while start < len(batch.prompts):
                parts.append((batch, slice(start, start + size)))
                start, size = start + size, min(2 * size, _MAX_PART if encodes else _MAX_IDS_PART)
        return Lookahead(self._make, parts, threaded=encodes)

    def _make(self, part: tuple[PoolingBatch, slice]) -> list[EncodedPrompt]:
        # prompts of similar length in one step need little padding, where the device pads
        return sorted(self.read(*part), key=_length)


def _length(one: EncodedPrompt) -> int:
    return len(one.ids)


class PoolingPrompts:
    """The prompts of some batches. Iterating gives their messages; `in_order` restores the order of the batches.

    A prompt that is equal to an earlier one with the same parameters is not sent again.
    """

    def __init__(
        self,
        inputs: PoolingInputs,
        batches: list[PoolingBatch],
        new_id: Callable[[], str],
        *,
        as_lists: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """`as_lists`: token ids are lists, for a core in another process, instead of arrays. `lora_request`: the
        adapter of all prompts."""
        self.inputs = inputs
        self._lora = inputs.description.check_adapter(lora_request)
        self.batches = batches
        self.total = sum(len(batch.prompts) for batch in batches)
        self.has_one_priority = len({own.priority for batch in batches for own in batch.each_params()}) < 2
        self._new_id = new_id
        self._as_lists = as_lists
        self._sent: list[int] = [0] * self.total  # by prompt: the index of the message that computes its result
        self._duplicates: dict[int, str | None] = {}  # by prompt: the text of a prompt that equals an earlier one
        self._encoded = inputs.prepare(batches)

    def is_ready(self) -> bool:
        """Whether the next message is available without waiting."""
        return self._encoded.is_ready()

    def __iter__(self) -> Iterator[PreparedPrompt]:
        start = num_sent = 0
        sent, new_id = self._sent, self._new_id
        for batch in self.batches:
            seen: dict[Any, int] = {}
            for one in islice(self._encoded, len(batch.prompts)):
                params, ids = one.params, one.ids
                if not params.query_key:  # the core counts the uses of a query, so each document is sent
                    key: Any = ids.tobytes()
                    if params is not batch.params or one.type_start is not None or one.num_seen is not None:
                        key = key, one.type_start, one.num_seen, id(params)
                    first = seen.setdefault(key, num_sent)
                    if first != num_sent:
                        sent[start + one.index] = first
                        self._duplicates[start + one.index] = one.text
                        continue
                sent[start + one.index] = num_sent
                num_sent += 1
                yield (
                    Submit(
                        new_id(),
                        ids.tolist() if self._as_lists else ids,  # type: ignore[arg-type]  # an array of ints
                        params,
                        time.time(),
                        params.priority,
                        params.cache_salt,
                        type_start=one.type_start,
                        num_seen=one.num_seen,
                        lora=self._lora,
                    ),
                    one.text,
                )
            start += len(batch.prompts)

    def num_bytes(self, submits: Sequence[PreparedPrompt]) -> int:
        """The size of all results, duplicates included. `submits`: all messages, in the order of iteration."""
        each = [num_result_bytes(self.inputs.description, message) for message, _ in submits]
        return sum(each[sent] for sent in self._sent)

    def in_order(self, sent_results: Sequence[PoolingRequestOutput[Any]]) -> list[Any]:
        """Returns one result per prompt, in the order of the batches, from those of all messages as they were sent."""
        results = [sent_results[sent] for sent in self._sent]
        for index, text in self._duplicates.items():
            if text != results[index].prompt:  # another text with the same tokens
                results[index] = msgspec.structs.replace(results[index], prompt=text)
        return results


# Checks PoolingParams against the model: tasks, dimensions, labels and lengths.

VECTOR_TASKS = ("embed", "token_embed")


def resolve_params(
    params: PoolingParams | None, task: Task | None, pooling: PoolingInfo, description: ModelDescription
) -> PoolingParams:
    """Returns parameters with a task. Raises if the model cannot do what they say."""
    model_name = description.name
    params = PoolingParams() if params is None else params
    if not isinstance(params, PoolingParams):
        raise InvalidParams(f"pooling_params is {type(params).__name__}; give PoolingParams or a list of them")
    if task is not None and params.task not in (None, task):
        raise InvalidParams(
            f"pooling_params has the task {params.task} and the call {task}; use encode, or remove one of them"
        )
    task = task or params.task or pooling.tasks[0]
    if task not in pooling.tasks:
        can = (*pooling.tasks, "generate") if pooling.generates else pooling.tasks
        fact = f"{model_name} does not do {task}; it does {', '.join(can)}"
        raise InvalidParams(f"{_why_not(task, pooling)} {fact}", param="task")
    if params.dimensions is not None:
        _check_dimensions(params.dimensions, task, pooling, model_name)
    if params.normalize is not None and task not in VECTOR_TASKS:
        raise InvalidParams(
            f"normalize is {params.normalize} and the task {task}, which has no vectors; remove it",
            param="normalize",
        )
    if (params.step_tag_id is not None or params.columns) and task != "token_classify":
        raise InvalidParams(
            f"step_tag_id and returned_token_ids are for token_classify; the task is {task}",
            param="returned_token_ids" if params.columns else "step_tag_id",
        )
    if params.columns and max(params.columns) >= pooling.num_labels:
        raise InvalidParams(
            f"returned_token_ids has {max(params.columns)}; {model_name} has labels 0 to {pooling.num_labels - 1}",
            param="returned_token_ids",
        )
    if params.extra_kwargs is not None:
        raise InvalidParams("extra_kwargs are for score and rerank; remove them", param="extra_kwargs")
    if (keep := params.truncate_prompt_tokens) is not None and keep > description.max_model_len:
        raise InvalidParams(
            f"truncate_prompt_tokens is {keep}, {model_name} takes {description.max_model_len}; "
            "give at most that, or -1",
            param="truncate_prompt_tokens",
        )
    return params if params.task == task else params.with_changes(task=task)


def _why_not(task: str, pooling: PoolingInfo) -> str:
    """The first words of an error are vLLM's: programs recognise them."""
    if task not in TASKS:
        return "No IOProcessor plugin installed." if task == "plugin" else f"{task!r:.50} is no pooling task."
    if {task, *pooling.tasks} == {"classify", "token_classify"}:
        return f"Try switching the model's pooling_task via the argument task={task!r} of LLM:"
    api = "Classification" if task in ("classify", "token_classify") else "Embedding"
    return f"{api} API is not supported by this model:"


def _check_dimensions(dimensions: int, task: Task, pooling: PoolingInfo, model_name: str) -> None:
    if task not in VECTOR_TASKS:
        raise InvalidParams(
            f"dimensions is {dimensions} and the task {task}, which has no vectors; remove it", param="dimensions"
        )
    size = pooling.embed_size if task == "embed" else pooling.token_size
    sizes = pooling.matryoshka
    if dimensions > size:
        raise InvalidParams(
            f"dimensions is {dimensions}; vectors of {model_name} have {size}, lower it", param="dimensions"
        )
    if sizes is None:
        raise InvalidParams(
            f"{model_name} was not trained for shorter vectors (Matryoshka); remove dimensions", param="dimensions"
        )
    if sizes != "any" and dimensions not in (*sizes, size):
        raise InvalidParams(
            f"dimensions is {dimensions}; {model_name} was trained for {', '.join(map(str, sizes))}",
            param="dimensions",
        )
