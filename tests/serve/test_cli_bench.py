"""`slipstream bench` and benchmarks/offline.py on a model of made weights."""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.serve.bench import tables
from slipstream.serve.bench.measure import SHAPES, Shape, Workload
from slipstream.serve.cli.main import main
from small_model import write_small
from tiny_encoder import write_tiny_encoder

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
    flags = ["--json", "--num-prompts", "6", "--input-len", "20", "--output-len", "5", "--repeats", "2"]
    assert main(["bench", *model, *flags]) == 0
    out, table = capsys.readouterr()
    assert ": 6 x 20 -> 5, best of 2\n" in table and "between tokens" in table
    facts = json.loads(out)
    assert (facts["input_tokens"], facts["output_tokens"], facts["num_requests"]) == (120, 30, 6)
    assert facts["cached_tokens"] == 0  # the second trial has prompts of its own
    assert facts["workload"]["output_len"] == 5 and facts["engine"]["device"] == "cpu"
    assert facts["output_tokens_per_second"] == pytest.approx(30 / facts["seconds"])
    assert facts["total_tokens_per_second"] == pytest.approx(150 / facts["seconds"])
    assert facts["requests_per_second"] == pytest.approx(6 / facts["seconds"])
    assert len(facts["trial_seconds"]) == 2 and min(facts["trial_seconds"]) == facts["seconds"]
    assert facts["startup_seconds"] > 0
    first, between, whole = facts["ttft_ms"], facts["itl_ms"], facts["request_ms"]
    assert 0 < between["p50"] <= between["p90"] <= between["p99"]
    assert first["p50"] <= whole["p50"] <= 1000 * facts["seconds"]


def test_the_table_shows_rates_and_percentiles(model, capsys):
    out = bench(capsys, model, "--num-prompts 2 --input-len 8 --output-len 4 --range-ratio 0.5")
    assert ": 2 x 8 -> 4, lengths from 0.5 of that\n" in out
    for line in ("start-up", "requests", "output tokens", "total tokens", "first token", "between tokens"):
        assert f"\n  {line} " in out


def test_results_are_drawn_and_steps_are_traced(model, capsys, tmp_path):
    flags = f"--num-prompts 2 --input-len 8 --output-len 4 --plot {tmp_path}/plot.svg --trace {tmp_path}/trace.json"
    out = bench(capsys, model, flags)
    assert "output tokens per second\n  2 x 8 -> 4" in out and "first token p99" in out and "█" in out
    assert "between tokens p50" in (tmp_path / "plot.svg").read_text()
    spans = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    assert len(spans) > 8
    assert main(["bench", "startup", *model, "--trace", "x"]) == 2
    assert "--trace is for an engine in this process" in capsys.readouterr().err


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
        (["--input-len", "2000"], "a request of 2000 + 64 tokens is longer than --max-model-len"),
        (["--machine"], "--machine is for CUDA GPUs, and this engine runs on cpu; remove it"),
        (["--machine", "--model", "nowhere"], "--machine is for CUDA GPUs"),  # before anything is loaded
        (["serve", "--url", "http://127.0.0.1:1", "--machine"], "serve measures others; remove it"),
        (["startup", "--machine"], "startup measures others; remove it"),
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
    sampled = dict(temperature=0.8, top_p=0.95, top_k=50)
    monkeypatch.setitem(SHAPES, "bs1", Shape(Workload(num_prompts=1, input_len=16, output_len=8)))
    monkeypatch.setitem(SHAPES, "sample", Shape(Workload(num_prompts=3, input_len=16, output_len=8), sampled))
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
    shapes = SHAPES
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
    items = shapes["nano"].workload.items(10)
    assert min(len(item.prompt) for item in items) >= 100 and max(item.output_len for item in items) <= 1024


@pytest.fixture
def small_shapes(monkeypatch):
    """The named shapes, as small as a test can bear."""
    for name, shape in list(SHAPES.items()):
        monkeypatch.setitem(SHAPES, name, Shape(Workload(num_prompts=3, input_len=9, output_len=6), shape.params))


def test_shapes_by_name_are_a_line_each(model, capsys, small_shapes):
    out = bench(capsys, model, "--shape bs1 sample logprobs pen512").splitlines()
    assert [line.split()[0] for line in out[2:]] == ["bs1", "sample", "logprobs", "pen512"]
    facts = json.loads(bench(capsys, model, "throughput --shape longpen bs1 --json"))
    assert list(facts["shapes"]) == ["longpen", "bs1"]
    assert facts["shapes"]["longpen"]["params"]["presence_penalty"] == 0.2
    assert facts["shapes"]["bs1"]["output_tokens"] == 18 and facts["engine"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--input-len 9", "--shape sets the lengths and the sampling, and --input-len is given"),
        ("--num-prompts 32", "and --num-prompts is given"),  # its default
        ("--random-seed 3", "and --random-seed is given"),
        ("--temperature 0.5", "and --temperature is given"),
        ("--logprobs 2", "and --logprobs is given"),
        ("serve --url http://127.0.0.1:1", "--shape is for an engine in this process, and serve measures others"),
        ("startup", "and startup measures others"),
    ],
)
def test_flags_that_a_shape_would_ignore_are_refused(capsys, flags, message):
    assert main(["bench", *flags.split(), "--shape", "bs1"]) == 2
    assert message in capsys.readouterr().err


def test_a_shape_that_is_too_long_does_not_keep_the_others_from_it(model, capsys, small_shapes, monkeypatch):
    monkeypatch.setitem(SHAPES, "long", Shape(Workload(num_prompts=1, input_len=9, output_len=5000)))
    for kind in ("throughput", "latency", "long", "step"):
        facts = json.loads(bench(capsys, model, f"{kind} --shape bs1 long sample --json"))["shapes"]
        assert "longer than" in facts["long"]["error"] and list(facts) == ["bs1", "long", "sample"]
        assert facts["sample"]["device"]["num_steps"] > 0
        lines = bench(capsys, model, f"{kind} --shape bs1 long sample")
        assert "long" in lines and "longer than" in lines and lines.index("sample") > lines.index("bs1")


def test_the_devices_time_is_in_the_report(model, capsys):
    flags = "--num-prompts 3 --input-len 8 --output-len 5"
    assert "  device            busy " in bench(capsys, model, flags)
    facts = json.loads(bench(capsys, model, flags + " --json"))
    device = facts["device"]
    assert device["num_steps"] == facts["num_steps"] and 0 < facts["device_busy_share"] <= 1
    accounted = sum(device[name] for name in ("busy", "turnaround", "host_late", "output"))
    assert 0.5 * facts["seconds"] < accounted <= facts["seconds"]


def test_latency_under_load_comes_at_a_rate_or_at_a_share_of_the_peak(model, capsys):
    flags = "latency --num-prompts 5 --input-len 8 --output-len 4"
    facts = json.loads(bench(capsys, model, flags + " --rate 500 --json"))
    assert facts["workload"]["rate"] == 500 and facts["output_tokens"] == 20
    assert facts["ttft_ms"]["p99"] > 0 and facts["itl_ms"]["p99"] > 0
    assert " requests/s, best of 2" in bench(capsys, model, flags + " --load 0.9 --repeats 2")


def test_a_latency_trial_has_no_prefix_cache_hits_of_the_throughput_trial(model, capsys):
    found = json.loads(bench(capsys, model, "latency --num-prompts 4 --input-len 40 --output-len 3 --load 0.9 --json"))
    assert found["input_tokens"] == 160 and found["cached_tokens"] == 0


def test_no_two_workloads_have_prompts_in_common():
    few, more = (Workload(num_prompts=2, input_len=30, output_len=n) for n in (5, 6))
    prompts = [
        tuple(item.prompt) for workload in (few, more) for trial in (0, 1) for item in workload.items(999, trial)
    ]
    assert len({prompt[:16] for prompt in prompts}) == 8
    assert few.items(999) == few.items(999)


def test_arrivals_are_a_poisson_process_of_the_wanted_rate():
    workload = Workload(num_prompts=4000, input_len=1, output_len=1)
    times = workload.arrivals(50.0)
    assert times == sorted(times) == workload.arrivals(50.0) != workload.arrivals(50.0, trial=1)
    assert times[-1] == pytest.approx(80, rel=0.1)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert spread == pytest.approx(mean**2, rel=0.15)  # as exponential gaps have it


def test_long_texts_are_compared_with_penalised_ones(model, capsys):
    flags = "long --num-prompts 2 --input-len 4 --output-len 580"
    lines = bench(capsys, model, flags).splitlines()
    assert "at 500" in lines[1] and [line.split()[0] for line in lines[2:]] == ["plain", "penalised"]


def test_shapes_of_any_lengths_are_compared_along_their_texts(model, capsys, small_shapes, monkeypatch):
    monkeypatch.setitem(SHAPES, "long", Shape(Workload(num_prompts=1, input_len=4, output_len=580)))
    for names in ("long bs1", "bs1 long"):
        lines = bench(capsys, model, f"long --shape {names}").splitlines()
        assert "at 500" in lines[1] and [line.split()[0] for line in lines[2:]] == names.split()
        of = {line.split()[0]: line.split()[1:] for line in lines[2:]}
        assert of["bs1"][1] == "-" and float(of["long"][1]) > 0


def test_steps_show_the_hosts_part(model, capsys):
    out = bench(capsys, model, "step --num-prompts 2 --input-len 4 --output-len 6")
    assert "us per step: plan, launch, commit" in out
    facts = json.loads(bench(capsys, model, "step --num-prompts 2 --input-len 4 --output-len 6 --json"))
    assert facts["shapes"]["given"]["device"]["host"] > 0


def test_startup_of_a_model_that_only_pools_ends_with_its_first_vector(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_NATIVE", "0")
    model = ["--model", str(write_tiny_encoder(tmp_path, "bert", "Model")), "--num-threads", "1"]

    def run_here(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        """In place of a new process, which imports torch for seconds."""
        monkeypatch.setattr(sys, "argv", command[2:])
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(command[2], {})
        return subprocess.CompletedProcess(command, 0, out.getvalue(), "")

    monkeypatch.setattr(tables.subprocess, "run", run_here)
    lines = bench(capsys, model, "startup").splitlines()
    assert lines[0].split() == ["seconds", "import", "start", "1", "result", "total"]
    assert [line.split()[0] for line in lines[1:]] == ["cold", "warm"]


@pytest.mark.slow
def test_startup_is_measured_in_new_processes(model, capsys, monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_NATIVE", "0")  # compiling the C kernels takes most of a cold start
    facts = json.loads(bench(capsys, model, "startup --json"))
    cold, warm = facts["starts"]
    assert cold["answer"] == warm["answer"] == "2 tokens"
    assert cold["cold"] and not warm["cold"] and min(cold["import_seconds"], warm["start_seconds"]) > 0
