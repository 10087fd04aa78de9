"""Experts that leave the sum over a token's experts to the norm of the next layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hand_batch import HandRunner
from hand_load import load
from slipstream.nn.block import DecoderBlock
from slipstream.nn.layers import experts
from slipstream.nn.load import shortened
from slipstream.ops.elementwise import add_rms_norm
from slipstream.ops.gemm.moe import Routing, UnsummedExperts
from tiny import write_tiny

TEXTS = {"a": list(range(3, 40)), "b": [5, 9, 33, 2, 71], "c": [8]}


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each sum that was left. On the CPU there is no kernel for it, so plain torch takes its place."""
    made: list[int] = []

    def unsummed(x: torch.Tensor, routing: Routing, *rest: Any) -> UnsummedExperts:
        made.append(len(x))
        return UnsummedExperts(experts.expert_mlp(x, routing, *rest), None, routing, 0, None)

    def add_and_norm(self: UnsummedExperts, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return add_rms_norm(self.made, *rest)

    monkeypatch.setattr(experts, "unsummed_experts", unsummed)
    monkeypatch.setattr(UnsummedExperts, "add_and_norm", add_and_norm)
    return made


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next", "mixtral"])
def test_all_layers_but_the_last_leave_sums(family: str, left: list[int], tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, family, torch.float64), torch.float64)
    mine = HandRunner(model, torch.float64).run_last(TEXTS)
    num_sparse = sum(isinstance(block.sublayers[-1].module, experts.Experts) for block in model.layers[:-1])
    assert left == [sum(map(len, TEXTS.values()))] * num_sparse and num_sparse
    for block in model.layers:
        block.leave_sum_to(None)
    theirs = HandRunner(model, torch.float64).run(TEXTS)
    assert len(left) == num_sparse
    for name in TEXTS:
        torch.testing.assert_close(mine[name], theirs[name][-1], rtol=0, atol=1e-12)


def test_who_reads_a_layers_output_gets_sums(tmp_path: Path) -> None:
    model = load(write_tiny(tmp_path, "qwen3_moe", num_hidden_layers=4))

    def leaving() -> list[bool]:
        assert all(type(block) is DecoderBlock for block in model.layers)
        return [block.sublayers[-1].module.leaves_sum for block in model.layers]

    assert leaving() == [True, True, True, False]
    with shortened(model):
        assert leaving() == [True, True, False]
    assert leaving() == [True, True, True, False]
    model.tap((1,))
    assert leaving() == [False] * 4, "taps read the sum before a layer"
