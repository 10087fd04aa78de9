"""Weights in host memory: the layers that are chosen, memory, results; on a GPU engines with and without."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream import LLM, SamplingParams
from slipstream.base.errors import InvalidOption
from slipstream.nn.weights.offloaded_layers import OffloadedLayers, count_offloaded, parameter_bytes, saved_bytes
from slipstream.nn.weights.weight_format import UnquantizedWeight
from tiny import write_tiny


class Layer(nn.Module):
    def __init__(self, size, dtype=torch.float32):
        super().__init__()
        self.inner = nn.Linear(size, size, bias=False, dtype=dtype)
        self.bias = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x):
        return torch.tanh(self.inner(x) + self.bias)


def make_layers(count, size=24):
    with torch.device("meta"):
        return nn.ModuleList(Layer(size) for _ in range(count)).requires_grad_(requires_grad=False)


def run(offloaded, layers, x):
    for _, layer in offloaded.in_turn(layers) if offloaded is not None else enumerate(layers):
        x = layer(x)
    return x


@pytest.mark.parametrize(("num_layers", "num_offloaded"), [(5, 5), (6, 3), (4, 2), (3, 1)])
def test_results_are_those_of_resident_layers(num_layers, num_offloaded):
    layers, plain = make_layers(num_layers), make_layers(num_layers)
    offloaded = OffloadedLayers(layers, num_offloaded, torch.device("cpu"))
    for each in (layers, plain):
        for module in each.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.is_meta:
                    setattr(module, name, nn.Parameter(torch.empty(parameter.shape), requires_grad=False))
    values = torch.Generator().manual_seed(0)
    for own, other in zip(layers.parameters(), plain.parameters(), strict=True):
        own.copy_(other.copy_(torch.randn(own.shape, generator=values) / 4))
    x = torch.randn(3, 24, generator=values)
    expected = run(None, plain, x)
    assert torch.equal(run(offloaded, layers, x), expected), "host memory is read before the start"
    offloaded.start()
    for _ in range(2):
        assert torch.equal(run(offloaded, layers, x), expected)
    assert offloaded.num_bytes == sum(parameter_bytes(layers)[-num_offloaded:])
    addresses = {layer.inner.weight.data_ptr() for layer in list(layers)[-num_offloaded:]}
    assert len(addresses) == min(num_offloaded, 2), "two buffers take turns"


def test_rows_of_a_weight_follow_it_to_other_memory():
    weight = UnquantizedWeight(6, 4, torch.float32)
    weight.data = nn.Parameter(torch.ones(6, 4), requires_grad=False)
    rows = weight.rows(2, 5)
    assert rows is weight.rows(2, 5), "kernels keep counters by weight"
    weight.data.data = torch.full((6, 4), 2.0)  # as `OffloadedLayers.start` does
    assert torch.equal(weight.rows(2, 5), torch.full((3, 4), 2.0))


def test_layers_are_chosen_by_what_they_save():
    sizes = [100] * 6
    assert [saved_bytes(sizes, count) for count in range(7)] == [0, 0, 0, 100, 200, 300, 400]
    assert [count_offloaded(sizes, wanted) for wanted in (0, 1, 100, 101, 400)] == [0, 3, 3, 4, 6]
    with pytest.raises(InvalidOption, match="can leave the device"):
        count_offloaded(sizes, 401)
    assert parameter_bytes(make_layers(2)) == [24 * 24 * 4 + 256] * 2


def test_a_cpu_has_nothing_to_offload(tmp_path):
    with pytest.raises(InvalidOption, match="host memory anyway"):
        LLM(write_tiny(tmp_path), device="cpu", cpu_offload_gb=1)


@pytest.mark.cuda
@pytest.mark.parametrize("eager", [False, True])
def test_a_gpu_gives_the_same_tokens(tmp_path, eager):
    """In float32, where layers run one by one also without offload."""
    folder = write_tiny(tmp_path, num_hidden_layers=6)
    prompts = [[1 + (7 * row + at) % 200 for at in range(5 + 9 * row)] for row in range(6)]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)
    found = []
    for offload in (0, 2.5e-4):
        options = dict(device="cuda", num_pages=128, enforce_eager=eager, skip_tokenizer_init=True)
        with LLM(
            folder, dtype="float32", max_model_len=128, cpu_offload_gb=offload, use_tqdm_on_load=False, **options
        ) as llm:
            is_offloaded = llm.apply_model(lambda model: model.offloaded is not None)[0]
            assert is_offloaded == bool(offload)
            found.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
