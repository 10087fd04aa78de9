"""Checks PoolingParams against the model: tasks, dimensions, labels and lengths."""

from __future__ import annotations

from slipstream.base.errors import InvalidParams
from slipstream.checkpoint.pooling_info import PoolingInfo
from slipstream.engine.model_description import ModelDescription
from slipstream.params.pooling import TASKS, PoolingParams, Task

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
