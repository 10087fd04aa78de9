"""Law 9: a feature is added at an extension point; the files that hold the order of a step do not name it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from import_graph import import_graph
from replay_device import PaddedAttention, ReplayDevice, captured_forwards
from slipstream import LLM, SamplingParams
from slipstream.nn.context import GivenEmbeddings
from slipstream.runner.features import ForwardPart, StepFeature
from tiny import write_tiny

SRC = Path(__file__).parents[2] / "src"
Graph = dict[str, set[str]]

# All that the files of the order of a step may import from the package. A feature does not appear here: it is
# registered at its extension point (ARCHITECTURE.md). An entry is added only if the order of a step changes.
STEP_ORDER = {
    "runner.runner": """
        contracts.step device.streams device.sync_check nn.context nn.decoder runner.features runner.graphs
        runner.input_batch runner.results runner.staging runner.stores
    """,
    "engine.core": """
        base.errors config.config contracts.messages contracts.request contracts.step engine.pacing handoff.client
        params.pooling params.sampling record.device_timing record.recorder record.step_log scheduler.adapters
        scheduler.cache.manager scheduler.encoder_scheduler scheduler.grammar.constraints scheduler.scheduler
        scheduler.step_scheduler
    """,
}

# Modules of a package of implementations that other files may import: interfaces, registries and shared parts. The
# implementations are imported by their package, and by the files named after a colon, only.
INTERFACES = {
    "runner.sampling": "sampler stage logprobs",
    "runner.model_drafter": ": runner.build",
    "nn.families": "llama: nn.registry",
    "serve.cli": "",
}


def short(graph: Graph) -> Graph:
    """Names without that of the package, whose `__init__` and version every file may import."""
    cut = "slipstream."
    return {
        name.removeprefix(cut): {each.removeprefix(cut) for each in found if each.startswith(cut)}
        for name, found in graph.items()
        if name.startswith(cut)
    }


@pytest.fixture(scope="module")
def graph() -> Graph:
    return short(import_graph(SRC))


def features_in_the_step(graph: Graph) -> list[str]:
    """Imports of the files of the order of a step that are not in the list, and entries that are no import any more."""
    return [f"{file}: {name}" for file, names in STEP_ORDER.items() for name in sorted(graph[file] ^ {*names.split()})]


def outside_of_their_package(graph: Graph) -> list[str]:
    """Imports of implementations by files outside of their package."""
    found = []
    files = graph.keys() | {name for names in graph.values() for name in names}
    files -= {package for package in INTERFACES if any(name.startswith(f"{package}.") for name in files)}
    for package, names in INTERFACES.items():
        shared, _, builders = names.partition(":")
        allowed = {f"{package}.{name}" for name in shared.split()}
        for file in sorted(graph.keys() - builders.split()):
            if not f"{file}.".startswith(f"{package}."):
                imported = {name for name in graph[file] if f"{name}.".startswith(f"{package}.") and name in files}
                found += [f"{file}: {name}" for name in sorted(imported - allowed)]
    return found


def test_only_the_core_that_makes_a_scheduler_knows_its_kind(graph: Graph) -> None:
    kinds = {"scheduler.scheduler", "scheduler.encoder_scheduler"}
    assert [name for name, found in graph.items() if found & kinds] == ["engine.core"]


def test_the_order_of_a_step_names_no_feature(graph: Graph) -> None:
    assert features_in_the_step(graph) == []


def test_implementations_are_imported_by_their_package_only(graph: Graph) -> None:
    assert outside_of_their_package(graph) == []


@pytest.mark.parametrize(
    ("file", "feature"),
    [
        ("runner.runner", "runner.sampling.penalties"),
        ("runner.runner", "runner.lora_store"),
        ("engine.core", "scheduler.grammar.structural_tag"),
    ],
)
def test_a_feature_in_the_order_of_a_step_is_found(graph: Graph, file: str, feature: str) -> None:
    assert features_in_the_step({**graph, file: graph[file] | {feature}}) == [f"{file}: {feature}"]


def test_an_entry_that_is_no_import_any_more_is_found(graph: Graph) -> None:
    without = {**graph, "engine.core": graph["engine.core"] - {"engine.pacing"}}
    assert features_in_the_step(without) == ["engine.core: engine.pacing"]


@pytest.mark.parametrize(
    ("file", "implementation"),
    [
        ("runner.generate_head", "runner.sampling.truncate"),
        ("runner.warmup", "runner.model_drafter"),
        ("engine.build", "nn.families.gemma"),
        ("api.llm", "serve.cli.chat"),
    ],
)
def test_an_implementation_that_is_imported_elsewhere_is_found(graph: Graph, file: str, implementation: str) -> None:
    found = outside_of_their_package({**graph, file: graph[file] | {implementation}})
    assert found == [f"{file}: {implementation}"]


FIRST = 90  # of the token ids that the arena has embeddings for


class ArenaEmbeddings(StepFeature):
    """A feature of a step in one class: some tokens have embeddings that lie on the device, in a table of slots. Unlike
    embeddings that requests bring, they leave steps padded and captured."""

    def __init__(self, arena: torch.Tensor) -> None:
        self.arena = arena
        self.num_steps = 0

    def join_forward(self, plan, upload, size):
        is_given = plan.tokens >= FIRST
        if not is_given.any():
            return None
        self.num_steps += 1
        starts = np.cumsum(plan.num_tokens) - plan.num_tokens
        spans = zip(starts.tolist(), plan.num_host_tokens.tolist(), strict=True)
        indices = np.concatenate([np.arange(start, start + num) for start, num in spans])[is_given]
        slots = plan.tokens[is_given] - FIRST
        if size is not None:  # the last one is written several times
            indices, slots = (np.pad(each, (0, size.tokens - len(slots)), "edge") for each in (indices, slots))
        where, which = upload.put(indices.astype(np.int64)), upload.put(slots.astype(np.int64))

        def add(batch, context):
            given = GivenEmbeddings(upload.tensor(where), self.arena.index_select(0, upload.tensor(which)))
            return replace(context, batch=replace(context.batch, embeds=given))

        return ForwardPart("arena", add)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_a_feature_joins_a_step_as_one_entry_of_the_list(tmp_path, graphs):
    """Its tokens are those of the ids whose embeddings are in the arena, in steps with chunks and decodes, beside
    prompts without it; and captured steps with and without it do not mix."""
    prompts = [[5, 6, *range(FIRST, FIRST + 9), 7], [8, FIRST + 3], [3, 4, 5], [9] * 14 + [FIRST] * 3]
    meant = [[each - FIRST + 10 if each >= FIRST else each for each in prompt] for prompt in prompts]
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    options = dict(
        use_tqdm_on_load=False, dtype="float64", max_model_len=32, page_size=4, max_num_seqs=3,
        max_num_batched_tokens=8, depth=1, enable_prefix_caching=False,
    )  # fmt: skip
    folder = str(write_tiny(tmp_path, "llama"))
    with LLM(folder, **options, _device=ReplayDevice(1) if graphs else None) as llm:
        runner = llm.core.executor
        runner.attention = PaddedAttention(runner.attention.groups, torch.float64)
        wanted = [result.outputs[0].token_ids for result in llm.generate(meant, params)]
        arena = ArenaEmbeddings(runner.model.embedding.weight.data[10 : 10 + 9].clone())
        runner.features.append(arena)
        assert [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == wanted
        assert [result.outputs[0].token_ids for result in llm.generate(meant, params)] == wanted
        assert arena.num_steps > 3
        keys = captured_forwards(runner.graphs)
        assert not graphs or {"arena" in key for key in keys} == {True, False}
