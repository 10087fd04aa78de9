from pathlib import Path

import pytest

import slipstream
from nets.ast_net import FOLDERS, find_in_source, find_in_tree
from slipstream.device.sync_check import sync_allowed

ROOT = Path(slipstream.__file__).parent

WAITING_CALLS = [
    "x.item()",
    "x.sum().item()",
    "x.tolist()",
    "x.cpu()",
    "x.cpu().numpy()",
    "x.numpy()",
    "x.cuda()",
    'x.to("cpu")',
    'x.to(device="cpu")',
    "x.nonzero()",
    "torch.nonzero(x)",
    "torch.argwhere(x)",
    "torch.where(x > 0)",
    "x.unique()",
    "torch.unique(x)",
    "torch.unique_consecutive(x)",
    "x.masked_select(m)",
    "torch.masked_select(x, m)",
    "torch.multinomial(x, 1)",
    "torch.repeat_interleave(x, n)",
    "x.repeat_interleave(n, dim=0)",
    "torch.tensor([1, 2], device=device)",
    "torch.as_tensor(array, device=device)",
    "torch.cuda.synchronize()",
    "stream.synchronize()",
    "[t.item() for t in tensors]",
    "print(f'{x.item()}')",
]


@pytest.mark.parametrize("call", WAITING_CALLS)
def test_a_planted_wait_is_caught_in_a_function_and_in_a_method(call):
    assert find_in_source(f"def launch(x):\n    return {call}\n")
    assert find_in_source(f"class Runner:\n    def launch(self, x):\n        if x is not None:\n            {call}\n")


@pytest.mark.parametrize("call", WAITING_CALLS)
def test_the_same_call_is_fine_with_a_reason(call):
    assert not find_in_source(f'def launch(x):\n    with sync_allowed("a test reads it"):\n        {call}\n')
    assert not find_in_source(f'def f(x):\n    with sync_check.sync_allowed("why"), other():\n        y = {call}\n')


@pytest.mark.parametrize(
    "call",
    [
        "np.nonzero(array)",
        "numpy.unique(array)",
        "plan.rows.tolist()",
        "plan.lengths[0].item()",
        "torch.where(m, a, b)",
        "torch.tensor([1, 2])",
        "torch.zeros(3, device=device)",
        "torch.repeat_interleave(x, n, output_size=8)",
        "x.to(torch.float32)",
        "x.items()",
        "item(x)",
    ],
)
def test_calls_that_do_not_wait_pass(call):
    assert not find_in_source(f"def launch(x):\n    return {call}\n")


@pytest.mark.parametrize("argument", ["", '""', '"  "', "reason", "f'{x}'", 'reason="why"', "3", '"one", "two"'])
def test_a_marker_without_a_literal_reason_is_caught(argument):
    (finding,) = find_in_source(f"def f(x):\n    with sync_allowed({argument}):\n        x.item()\n")
    assert "literal string" in finding.what and finding.line == 2


def test_what_a_block_defines_runs_later_and_is_not_covered():
    source = 'def f(x):\n    with sync_allowed("why"):\n        def later():\n            return x.item()\n'
    assert [finding.line for finding in find_in_source(source)] == [4]
    assert find_in_source('def f(x):\n    with sync_allowed("why"):\n        run(lambda: x.item())\n')


def test_what_a_function_annotates_as_numpy_may_be_read():
    assert not find_in_source("def f(rows: Ints):\n    return rows[2:].tolist()\n")
    assert not find_in_source("def f(x):\n    rows: NDArray[np.int32] = g(x)\n    return rows.nonzero()\n")
    assert find_in_source("def f(rows: Ints):\n    pass\ndef g(rows):\n    return rows.tolist()\n")
    assert find_in_source("def f(rows: torch.Tensor):\n    return rows.tolist()\n")
    assert find_in_source("def f(rows: Ints):\n    return upload(rows).tolist()\n")


def test_the_call_that_opens_another_block_is_looked_at():
    assert find_in_source("def f(x):\n    with open(x.item()):\n        pass\n")


def test_folders_are_searched_and_allowed_files_are_not(tmp_path):
    for name in ("runner/batch/rows.py", "runner/output.py", "nn/weights/load.py", "nn/quant.py", "engine/core.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x.item()\n")
    assert [finding.path for finding in find_in_tree(tmp_path)] == ["runner/batch/rows.py", "nn/quant.py"]


def test_a_finding_reads_like_a_compiler_message(tmp_path):
    (finding,) = find_in_source("\nx.item()\n", "ops/norm/reference.py")
    assert str(finding).startswith("ops/norm/reference.py:2: item() makes the host wait")


def test_the_device_half_never_waits_without_saying_why():
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert not [str(finding) for finding in find_in_tree(ROOT)]


def test_the_marker_wants_its_reason_when_it_runs():
    with sync_allowed("a test"):
        pass
    with pytest.raises(AssertionError, match="reason"):
        with sync_allowed(""):
            pass
