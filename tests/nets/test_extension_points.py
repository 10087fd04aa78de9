"""Law 9: a feature is added at an extension point; the files that hold the order of a step do not name it."""

from __future__ import annotations

from pathlib import Path

import pytest

from import_graph import import_graph

SRC = Path(__file__).parents[2] / "src"
Graph = dict[str, set[str]]

# All that the files of the order of a step may import from the package. A feature does not appear here: it is
# registered at its extension point (ARCHITECTURE.md). An entry is added only if the order of a step changes.
STEP_ORDER = {
    "runner.runner": """
        contracts.step device.device device.streams device.sync_check nn.context nn.decoder ops.recurrent
        runner.drafted_plan runner.drafter runner.graphs runner.input_batch runner.lora_store runner.page_tier
        runner.pool_head runner.pool_results runner.results runner.rows runner.sampling.sampler runner.staging
        runner.stores
    """,
    "engine.core": """
        base.errors config.config contracts.messages contracts.request contracts.step engine.pacing handoff.client
        params.pooling params.sampling record.device_timing record.recorder record.step_log scheduler.adapters
        scheduler.cache.manager scheduler.encoder_scheduler scheduler.grammar.constraints scheduler.scheduler
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


def test_the_order_of_a_step_names_no_feature(graph: Graph) -> None:
    assert features_in_the_step(graph) == []


def test_implementations_are_imported_by_their_package_only(graph: Graph) -> None:
    assert outside_of_their_package(graph) == []


@pytest.mark.parametrize(
    ("file", "feature"),
    [
        ("runner.runner", "runner.sampling.penalties"),
        ("runner.runner", "runner.model_drafter"),
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
