"""`slipstream bench` and benchmarks/offline.py on a model of made weights."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from slipstream.serve.cli.main import main
from small_model import write_small

OFFLINE = Path(__file__).parents[2] / "benchmarks" / "offline.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_small(tmp_path_factory.mktemp("bench"))
    return ["--model", folder, "--load-format", "dummy", "--num-threads", "1"]


def bench(capsys, model, flags):
    code = main(["bench", *model, *flags.split()])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_json_holds_what_was_run_and_how_fast(model, capsys):
    out = bench(capsys, model, "--json --num-prompts 6 --input-len 20 --output-len 5 --repeats 2")
    facts = json.loads(out)
    assert (facts["input_tokens"], facts["output_tokens"], facts["num_requests"]) == (120, 30, 6)
    assert facts["cached_tokens"] == 0  # the second trial has prompts of its own
    assert facts["workload"]["output_len"] == 5 and facts["engine"]["device"] == "cpu"
    assert facts["output_tokens_per_second"] == pytest.approx(30 / facts["seconds"])
    assert facts["total_tokens_per_second"] == pytest.approx(150 / facts["seconds"])
    assert facts["requests_per_second"] == pytest.approx(6 / facts["seconds"])
    assert facts["trial_seconds"][0] == facts["seconds"] <= facts["trial_seconds"][1]
    assert facts["startup_seconds"] > 0
    first, between, whole = facts["ttft_ms"], facts["itl_ms"], facts["request_ms"]
    assert 0 < between["p50"] <= between["p90"] <= between["p99"]
    assert first["p50"] <= whole["p50"] <= 1000 * facts["seconds"]


def test_the_table_shows_rates_and_percentiles(model, capsys):
    out = bench(capsys, model, "--num-prompts 2 --input-len 8 --output-len 4 --range-ratio 0.5")
    assert ": 2 x 8 -> 4, lengths from 0.5 of that\n" in out
    for line in ("start-up", "requests", "output tokens", "total tokens", "first token", "between tokens"):
        assert f"\n  {line} " in out


def test_concurrency_bounds_what_is_under_way(model, capsys):
    shape = "--num-prompts 4 --input-len 8 --output-len 6 --json --no-warmup"
    alone = json.loads(bench(capsys, model, shape + " --concurrency 1"))
    together = json.loads(bench(capsys, model, shape))
    assert alone["num_steps"] == 4 * together["num_steps"]
    assert alone["output_tokens"] == together["output_tokens"] == 24


def test_sampling_flags_reach_the_sampler(model, capsys):
    flags = "--num-prompts 2 --input-len 8 --output-len 4 --json --temperature 0.8 --top-p 0.9 --logprobs 3"
    assert json.loads(bench(capsys, model, flags))["output_tokens"] == 8


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--range-ratio", "2"], "range_ratio is 2.0"),
        (["--concurrency", "0"], "concurrency is 0"),
        (["--temperature", "-1"], "temperature is -1.0"),
        (["--input-len", "2000"], "a request of 2000 + 64 tokens is longer than max_model_len"),
    ],
)
def test_a_mistake_is_one_line(model, capsys, flags, message):
    assert main(["bench", *model, *flags]) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1


def load_offline():
    spec = importlib.util.spec_from_file_location("offline_benchmark", OFFLINE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_offline_benchmark_runs_a_shape_and_writes_its_figures(model, tmp_path, capsys, monkeypatch):
    offline = load_offline()
    monkeypatch.setitem(offline.SHAPES, "bs1", offline._shape(1, 16, 8))
    monkeypatch.setitem(offline.SHAPES, "sample", offline._shape(3, 16, 8, temperature=0.8, top_p=0.95, top_k=50))
    path = tmp_path / "out.json"
    argv = ["offline.py", *model, "--repeats", "2", "--json", str(path), "--shapes", "bs1", "sample", "prefill"]
    monkeypatch.setattr(sys, "argv", argv)
    assert offline.main() == 0
    facts = json.loads(path.read_text())
    assert list(facts["shapes"]) == ["bs1", "sample", "prefill"]
    assert facts["shapes"]["bs1"]["output_tokens"] == 8 and facts["shapes"]["sample"]["params"]["top_k"] == 50
    assert "longer than max_model_len" in facts["shapes"]["prefill"]["error"]  # and the others were measured
    assert facts["import_seconds"] >= 0 and facts["start_seconds"] > 0 and facts["machine"]["torch"]
    assert capsys.readouterr().out.splitlines()[2].startswith("bs1 ")


def test_the_shapes_are_those_of_the_table():
    shapes = load_offline().SHAPES
    assert {
        "bs1",
        "bs16",
        "offline",
        "decode",
        "nano",
        "prefill",
        "sample",
        "logprobs",
        "pen512",
        "long",
        "longpen",
    } == {*shapes}
    nano, _ = shapes["nano"]
    items = nano.items(10)
    assert min(len(item.prompt) for item in items) >= 100 and max(item.output_len for item in items) <= 1024
