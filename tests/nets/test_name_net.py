from pathlib import Path

import pytest

from nets.name_net import borrowed_helpers, find_unknown, find_unknown_in

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "code",
    [
        "from slipstream.config import no_such_module",
        "from slipstream.params.sampling import NoSuchParams",
        "import slipstream.no_such_module",
        "def test():\n    from slipstream.engine import build\n    build.no_such_function()",
        "from slipstream.ops.gemm import linear as ops\nops.reference.no_such_function(x)",
        "kernels = pytest.importorskip('slipstream.ops.gemm.linear.triton', reason='')\nkernels.no_such_kernel(x)",
        "module = importlib.import_module('slipstream.ops.gemm.linear.triton.no_such_module')",
        "monkeypatch.setattr('slipstream.ops.gemm.linear.triton.no_such_module.multiply', None)",
        "from slipstream.ops.gemm import linear\nmonkeypatch.setattr(linear, 'no_such_function', None)",
        "for name in ('linear', 'gone'):\n monkeypatch.setattr(f'slipstream.ops.gemm.{name}.dispatch', None)",
        "def f(name):\n importlib.import_module(f'slipstream.gone.{name}')",
        "with pytest.raises(ValueError):\n importlib.import_module('slipstream.gone')",
    ],
)
def test_names_that_do_not_exist_are_found(code):
    assert len(find_unknown(code)) == 1


@pytest.mark.parametrize(
    "code",
    [
        "import slipstream\nfrom slipstream import LLM, SamplingParams\nslipstream.LLM",
        "from slipstream.ops.gemm import linear as ops\nops.linear.__doc__\nops.tiles.skinny_gemm",
        "from slipstream.ops.gemm.moe import triton\ntriton.expert_mlp.__name__",
        "module = importlib.import_module('slipstream.ops.gemm.linear.gemv')\nmodule.dependent",
        "monkeypatch.setattr('slipstream.ops.gemm.linear.cublaslt.multiply', None)",
        "from slipstream.ops.gemm import linear\ndef test(linear):\n    linear.anything",
        "for name in ('lora', 'moe'):\n monkeypatch.setattr(f'slipstream.ops.gemm.{name}.reference', None)",
        "def f(name):\n importlib.import_module(f'slipstream.ops.gemm.{name}')",
        "with pytest.raises(ModuleNotFoundError, match='gone'):\n importlib.import_module('slipstream.gone')",
    ],
)
def test_names_that_exist_pass(code):
    assert not find_unknown(code)


def test_tests_and_benchmarks_use_names_that_exist():
    folders = [ROOT / name for name in ("tests", "benchmarks", "examples", "scripts")]
    assert not find_unknown_in(*folders)


def test_helpers_in_a_folder_are_imported_by_tests_of_the_folder_or_with_its_name(tmp_path):
    assert borrowed_helpers(ROOT / "tests") == []
    for name, text in {"a/help.py": "", "a/test_a.py": "import help\n", "b/test_b.py": "from help import x\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert borrowed_helpers(tmp_path) == ["b/test_b.py: help"]
