"""What every implementation of a decoder's blocks must do, the blocks one by one included.

A new implementation joins IMPLEMENTATIONS. Each is compared with the blocks one by one in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hand_batch import HandRow, HandRunner
from hand_load import load
from slipstream.nn import chains
from slipstream.nn.chains import CudaChain, FusedCpu
from slipstream.nn.decoder import Decoder
from slipstream.ops.platform import native
from tiny import write_tiny

IMPLEMENTATIONS = {"one by one": None, "chain": CudaChain, "fused": FusedCpu}
FAMILIES = {
    "one by one": ["llama", "gemma2", "gemma3", "qwen3", "olmo2"],
    "chain": ["llama", "mistral", "qwen3"],  # no norms after
    "fused": ["llama", "gemma2", "gemma3", "qwen3"],  # norms before
}
CASES = [(kind, family) for kind, families in FAMILIES.items() for family in families]
PROMPT = [5, 9, 33, 2, 71, 8, 14, 60]  # two pages


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def of_kind(kind: str, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Makes the model run by one implementation only. Returns whether it took each step."""
    taken: list[bool] = []
    if kind == "fused" and not native.build():
        pytest.skip("no C compiler here, or the kernels are turned off")
    if kind == "chain":
        monkeypatch.setattr(chains, "choose_chain", lambda x, weights, is_streaming: "library")
    implementation = IMPLEMENTATIONS[kind]
    if implementation is None:
        model.implementations = ()
        return taken
    made = implementation.of(list(model.layers), model.norm)
    assert made is not None, f"{kind} does not know the blocks of this family"
    run = made.run

    def counted(x, context):
        out = run(x, context)
        taken.append(out is not None)
        return out

    made.run = counted
    model.implementations = (made,)
    return taken


def exact(folder: Path, steps: list[dict[str, list[int]]]) -> list[dict[str, torch.Tensor]]:
    model = load(folder, torch.float64)
    model.implementations = ()
    runner = HandRunner(model, torch.float64)
    return [runner.run(chunks) for chunks in steps]


def assert_near(mine: torch.Tensor, theirs: torch.Tensor) -> None:
    torch.testing.assert_close(mine.double(), theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_rows_in_any_order_give_the_results_of_the_reference(
    kind: str, family: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path, family)
    prompts = {"a": PROMPT[:5], "b": list(range(3, 40)), "c": [8]}
    following = [{"a": [7], "b": [11], "c": [13]}, {"b": [40]}, {"c": [4], "a": [5], "b": [6]}]
    backwards = [dict(reversed(chunks.items())) for chunks in following]
    expected = exact(folder, [{name: ids} for name, ids in prompts.items()] + following)[len(prompts) :]
    model = load(folder)
    taken = of_kind(kind, model, monkeypatch)
    for steps in (following, backwards):
        runner = HandRunner(model)
        for name, ids in prompts.items():
            runner.run({name: ids})
        taken.clear()
        for chunks, theirs in zip(steps, expected, strict=True):
            for name, logits in runner.run(chunks).items():
                assert_near(logits, theirs[name])
        assert all(taken) and (kind == "one by one" or len(taken) == len(steps)), f"{kind} did not run"


@pytest.mark.every_second("family", "order")
@pytest.mark.parametrize("order", [["writer", "reader"], ["reader", "writer"]], ids="-".join)
@pytest.mark.parametrize(("kind", "family"), CASES)
def test_keys_are_written_before_any_row_reads_them(
    kind: str, family: str, order: list[str], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page is published in the plan that computes its last position, so another row of that plan may read it."""
    folder = write_tiny(tmp_path, family)
    expected = exact(folder, [{"reader": PROMPT}, {"reader": [42]}])[1]["reader"]
    model = load(folder)
    taken = of_kind(kind, model, monkeypatch)
    runner = HandRunner(model)
    runner.run({"writer": PROMPT[:-1]})
    runner.rows["reader"] = HandRow(list(runner.rows["writer"].pages), len(PROMPT))
    tokens = {"writer": [PROMPT[-1]], "reader": [42]}
    found = runner.run({name: tokens[name] for name in order})["reader"]
    assert kind == "one by one" or taken[-1]
    assert_near(found, expected)  # unwritten positions hold NaN


@pytest.mark.parametrize(("kind", "family"), CASES)
def test_a_step_that_is_refused_leaves_the_input_as_it_was(
    kind: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next implementation gets the same x."""
    folder = write_tiny(tmp_path, family)
    model = load(folder)
    of_kind(kind, model, monkeypatch)
    if kind == "chain":
        monkeypatch.setattr(chains, "choose_chain", lambda x, weights, is_streaming: "")
    runner = HandRunner(model)
    chunks = {"c": [8], "a": PROMPT[:5]}
    expected = exact(folder, [chunks])[0]
    for name, logits in runner.run(chunks).items():
        assert_near(logits, expected[name])
