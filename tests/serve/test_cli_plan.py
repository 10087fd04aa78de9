import json

import gguf
import pytest

from recurrent_model import write_recurrent
from slipstream.ops.gemm.low_bit import Interleaved
from slipstream.serve.cli.main import main
from small_model import write_small
from tiny import write_tiny
from tiny_gguf import write_gguf


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return ["--model", write_small(tmp_path_factory.mktemp("plan")), "--load-format", "dummy"]


def plan(capsys, *argv):
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def test_the_settled_configuration_and_its_memory_are_shown(model, capsys):
    out = plan(capsys, *model, "--max-num-seqs", "4", "--num-pages", "256", "--page-size", "16")
    lines = {line.split()[0]: line.split()[1] for line in out.splitlines() if line}
    assert (lines["dtype"], lines["max_model_len"], lines["max_num_seqs"]) == ("float32", "1024", "4")
    assert (lines["max_num_batched_tokens"], lines["num_pages"], lines["depth"]) == ("512", "256", "0")
    assert int(lines["num_threads"]) >= 1
    # 257 pages of 16 positions, 2 layers of keys and values, 2 heads of 8 numbers of 4 bytes
    assert lines["cache"] == f"{257 * 16 * 2 * 2 * 2 * 8 * 4 / 2**20:.1f}"
    assert lines["total"] and "█ " in out.splitlines()[-1]


def test_recurrent_states_and_checkpoints_are_shown(tmp_path, monkeypatch, capsys):
    folder = write_recurrent(tmp_path, "hybrid", monkeypatch)
    argv = ["--model", str(folder), "--load-format", "dummy", "--dtype", "float32", "--max-num-seqs", "4"]
    out = plan(capsys, *argv, "--num-checkpoints", "20")
    lines = {line.split()[0]: line.split()[1] for line in out.splitlines() if line}
    assert lines["num_checkpoints"] == "20" and "of 4 rows and the padding row" in out
    state = (2 * (24 + 2 * 24) + 16 + 2 * 16) * 4  # per layer a sum, and the last two inputs
    memory = json.loads(plan(capsys, *argv, "--num-checkpoints", "20", "--json"))["memory"]
    assert (memory["states"], memory["checkpoints"]) == (5 * state, 20 * state)


def test_auto_shows_the_length_it_chose(model, capsys):
    out = plan(capsys, *model, "--max-model-len", "auto", "--num-pages", "10")
    assert "max_model_len           160         what fits into memory" in out


def test_json_gives_bytes_that_add_up(model, capsys):
    memory = json.loads(plan(capsys, *model, "--json"))["memory"]
    assert memory["total"] == sum(memory["parts"].values()) and memory["parts"]["cache"] == memory["cache"]
    parts = ("weights", "cache", "tables", "features", "activations")
    rings = ("staging", "masks", "results", "result_growth")
    on_host = [f"{ring}_host" for ring in rings]
    assert memory["total"] == sum(memory[part] for part in (*parts, *rings, *on_host))
    assert memory["activations"] == max(memory["hidden"] + memory["attention"], memory["logits"]) + memory["unread"]


def test_a_cache_above_the_memory_of_the_host_is_a_warning(model, capsys, caplog):
    """Of all commands: plan and engines settle their configuration by the same function."""
    plan(capsys, *model, "--device", "cpu", "--kv-cache-memory", "20000GiB")
    (warning,) = [record for record in caplog.records if "the KV cache takes" in record.message]
    assert "lower kv_cache_memory or num_pages" in warning.message


def test_what_cannot_fit_is_one_line(model, capsys):
    assert main(["plan", *model, "--num-pages", "10"]) == 2
    assert "the cache holds 160 positions" in capsys.readouterr().err


def test_low_bit_weights_are_not_called_float32(tmp_path, capsys, monkeypatch):
    path = write_gguf(write_tiny(tmp_path, "llama"), gguf.GGMLQuantizationType.Q4_1)
    monkeypatch.setattr("slipstream.nn.load.find_kernel", lambda: Interleaved())
    assert "quantised as in the file, the rest float32" in plan(capsys, "--model", str(path), "--device", "cpu")
    assert "quantised" not in plan(capsys, "--model", str(path), "--device", "cpu", "--dequantize")
