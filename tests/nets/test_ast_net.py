from pathlib import Path

import pytest

import slipstream
from nets.ast_net import ALLOWED_FILES, FOLDERS, find_in_source, find_in_tree
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


LOOKS = [
    "bool(x)",
    "bool((x > 0).any())",
    "int(x[0])",
    "int(x.sum())",
    "float(x.max())",
    "float(-x)",
    "range(x[0])",
    "max(x)",
    "min(3, x.sum())",
    "any(x > i for i in range(3))",
    "sorted(x)",
    "print(x)",
    "f'{x}'",
    "str(x.mean())",
    "3 if x else 4",
    "3 if x.any() else 4",
    "3 if y else 4",
    "3 if x.sum() > 0 else 4",
    "3 if ready and x.any() else 4",
    "not x",
    "not x.any()",
    "x.any() and 3",
    "x.any() or 3",
    "0 < x[0] < 3",
    "3 in x",
    "[i for i in range(3) if x[i]]",
    "x[: y[0]]",
    "z[x > 0]",
    "int(torch.arange(3).sum())",
    "bool(F.relu(x))",
    "int(batch.lengths[0])",
    "3 if maybe else 4",
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_planted_look_at_a_tensor_is_caught_in_a_function_and_in_one_inside_it(look):
    fields = "class Batch:\n    lengths: torch.Tensor\n"
    head = "def launch(x: torch.Tensor, maybe: torch.Tensor | None, z, ready, batch):\n    y = x.cumsum(0) + 1\n"
    (finding,) = find_in_source(f"{fields}{head}    return {look}\n")
    assert "makes the host wait" in finding.what and finding.line == 5
    assert find_in_source(f"{fields}{head}    def later():\n        return {look}\n    return later\n")
    assert not find_in_source(f'{fields}{head}    with sync_allowed("a test"):\n        return {look}\n')


@pytest.mark.parametrize("statement", ["if x.any():", "while x:", "assert x.all()\n    if 1:", "if not x:"])
def test_a_statement_that_asks_a_tensor_is_caught(statement):
    assert find_in_source(f"def f(x: torch.Tensor):\n    {statement}\n        pass\n")
    assert not find_in_source(f"def f(x: NDArray[np.int32]):\n    {statement}\n        pass\n")
    assert not find_in_source(f"@triton.jit\ndef f(x: torch.Tensor):\n    {statement}\n        pass\n")


@pytest.mark.parametrize(
    "expression",
    [
        "len(x)",
        "int(len(x))",
        "int(x.shape[0])",
        "max(1, x.shape[0])",
        "range(len(x))",
        "3 if x is None else 4",
        "3 if x is not None and len(x) else 4",
        "3 if x.shape == y.shape else 4",
        "3 if x.dim() == 2 else 4",
        "3 if x.is_cuda else 4",
        "3 if x.dtype is torch.float32 else 4",
        "not x.is_contiguous()",
        "x[: len(y)]",
        "x[y]",
        "torch.where(x > 0, x, y)",
        "abs(x)",
        "x.numel() and 3",
        "f'{x.shape}'",
        "int(plan.lengths[0])",
        "bool(x.data_ptr() % 16)",
        "[row for row in x]",
        "float(torch.tensor(3.0).to(y.dtype))",
    ],
)
def test_what_is_known_of_a_tensor_without_its_values_passes(expression):
    fields = "class Batch:\n    lengths: torch.Tensor\n"
    head = "def launch(x: torch.Tensor | None, plan):\n    y = x + 1\n"
    assert not find_in_source(f"{fields}{head}    return {expression}\n")


def test_what_only_an_error_says_may_read_a_tensor():
    assert not find_in_source('def f(x: torch.Tensor):\n    assert len(x) == 2, f"{x}"\n')
    assert not find_in_source('def f(x: torch.Tensor):\n    raise ValueError(f"{x}")\n')


def test_a_field_that_is_something_else_in_another_class_is_not_taken_for_a_tensor():
    both = "class A:\n    lengths: torch.Tensor\nclass B:\n    lengths: NDArray[np.int32]\n"
    assert not find_in_source(f"{both}def f(b):\n    return int(b.lengths[0])\n")


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
        "pool_plan.queries.tolist()",
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
    for name in (
        "runner/rows.py",
        "runner/results.py",
        "nn/weights/load.py",
        "nn/weights/kinds.py",
        "engine/core.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x.item()\n")
    assert [finding.path for finding in find_in_tree(tmp_path)] == ["runner/rows.py", "nn/weights/kinds.py"]


def test_a_finding_reads_like_a_compiler_message(tmp_path):
    (finding,) = find_in_source("\nx.item()\n", "ops/elementwise/reference.py")
    assert str(finding).startswith("ops/elementwise/reference.py:2: item() makes the host wait")


def test_the_device_half_never_waits_without_saying_why():
    assert all((ROOT / folder).is_dir() for folder in FOLDERS)
    assert all((ROOT / name).is_file() for name in ALLOWED_FILES)
    assert not [str(finding) for finding in find_in_tree(ROOT)]


def test_the_marker_wants_its_reason_when_it_runs():
    with sync_allowed("a test"):
        pass
    with pytest.raises(AssertionError, match="reason"):
        with sync_allowed(""):
            pass
