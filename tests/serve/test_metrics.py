"""/metrics, the status line and traces, of real server processes."""

from __future__ import annotations

import json
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from patience import PATIENCE
from serve.server_process import ServerProcess


def samples(server, **headers):
    status, text = server.call("GET", "/metrics", **headers)
    assert status == 200
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found[(sample.name, *sorted(sample.labels.items()))] = sample.value
    return found


def total(found, name, **labels):
    return sum(
        value for key, value in found.items() if key[0] == name and labels.items() <= dict(key[1:]).items()
    )  # fmt: skip


def until(look, wanted):
    """Counts arrive within a moment: the core tells them when it comes to rest, front ends each other now and then."""
    deadline = time.monotonic() + PATIENCE
    while (found := look()) != wanted and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@pytest.fixture(scope="module")
def server(tiny_folder, pooling_folders):
    server = ServerProcess(
        f"chat={tiny_folder}", f"vectors={pooling_folders['vectors']}", "--workers", "2", "--num-pages", "64",
        "--log-format", "json", "--log-level", "info", "--status-interval", "0.2", "--dtype", "float32",
    )  # fmt: skip
    server.until("ready: serving")  # the second front end
    yield server
    assert server.stop() == 0, server.lines[-5:]


def test_before_anything_was_asked_there_are_zeros_and_not_nothing(server):
    found = samples(server)
    for name in ("vllm:num_requests_waiting", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"):
        assert found[(name, ("engine", "0"), ("model_name", "chat"))] == 0
    assert found[("vllm:kv_cache_usage_perc", ("engine", "0"), ("model_name", "chat"))] == 0


def test_counts_are_of_all_front_ends_under_our_names_and_vllms(server):
    body = {"prompt": "x" * 40, "max_tokens": 5, "temperature": 0, "ignore_eos": True, "model": "chat"}
    for _ in range(6):  # new connections, so both front ends get some
        assert server.call("POST", "/v1/completions", body)[0] == 200
    for _ in range(3):
        assert server.call("POST", "/v1/embeddings", {"input": ["ab", "abc"]})[0] == 200
    assert server.call("POST", "/v1/embeddings", {"input": []})[0] == 400

    def generated():
        found = samples(server)
        names = (("slipstream_generation_tokens_total", "model"), ("vllm:generation_tokens_total", "model_name"))
        return [total(found, name, **{label: "chat"}) for name, label in names]

    assert until(generated, [30, 30]) == [30, 30]

    def ended():
        found = samples(server)
        refused = total(found, "slipstream_http_requests_total", route="/v1/embeddings", status="400")
        return refused, total(found, "slipstream_requests_finished_total", model="vectors", reason="pooled")

    until(ended, (1, 6))
    found = samples(server)
    assert total(found, "slipstream_prompt_tokens_total", model="vectors") == 27
    assert total(found, "vllm:prompt_tokens_total", model_name="chat") == 240
    assert total(found, "slipstream_requests_finished_total", model="chat", reason="length") == 6
    assert total(found, "slipstream_requests_finished_total", model="vectors", reason="pooled") == 6
    assert total(found, "vllm:request_success_total", finished_reason="length") == 6
    assert total(found, "slipstream_http_requests_total", route="/v1/embeddings", status="400") == 1
    assert total(found, "slipstream_http_requests_total", route="/v1/completions", status="200") == 6
    counts = {"time_to_first_token": 6, "inter_token_latency": 24, "e2e_request_latency": 6}
    counts |= {f"request_{part}_time": 6 for part in ("queue", "prefill", "decode", "inference")}
    for name, count in counts.items():
        assert total(found, f"vllm:{name}_seconds_count", model_name="chat") == count, name
        assert total(found, f"slipstream_{name}_seconds_bucket", model="chat", le="+Inf") == count
        assert total(found, f"slipstream_{name}_seconds_sum", model="chat") > 0
    assert total(found, "slipstream_open_requests") == 0
    parts = [total(found, f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    whole = total(found, "vllm:e2e_request_latency_seconds_sum", model_name="chat")
    assert sum(parts) <= whole
    assert total(found, "vllm:request_inference_time_seconds_sum") == pytest.approx(parts[1] + parts[2])


def test_the_core_tells_its_lanes(server):
    server.call("POST", "/v1/completions", {"prompt": "y" * 40, "max_tokens": 2})
    server.call("POST", "/v1/completions", {"prompt": "y" * 40, "max_tokens": 2})  # 32 of its tokens are cached now
    server.call("POST", "/v1/embeddings", {"input": ["ab"]})

    def hits_and_steps():
        found = samples(server)
        hits = total(found, "vllm:prefix_cache_hits_total", model_name="chat")
        return hits >= 32, total(found, "slipstream_steps_total", model="vectors") > 0

    assert until(hits_and_steps, (True, True)) == (True, True)
    found = samples(server)
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        assert (name, ("engine", "0"), ("model_name", "chat")) in found
    assert total(found, "vllm:prefix_cache_queries_total", model_name="chat") >= 80
    assert total(found, "slipstream_device_seconds_total", model="chat", state="busy") > 0
    assert 0 < total(found, "slipstream_device_busy_ratio", model="chat") <= 1
    assert total(found, "vllm:cache_config_info", block_size="16", model_name="chat") == 1


def test_a_scraper_that_wants_openmetrics_gets_it(server):
    status, text = server.call("GET", "/metrics", accept="application/openmetrics-text; version=1.0.0")
    assert status == 200 and text.rstrip().endswith(b"# EOF")


def test_lines_of_json_name_the_request_and_the_status(server):
    status, _ = server.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1}, **{"x-request-id": "mine-1"})
    assert status == 200
    server.until("mine-1")
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    (said,) = [line for line in lines if line.get("request_id") == "mine-1"]
    assert (said["method"], said["route"], said["status"], said["level"]) == ("POST", "/v1/completions", 200, "info")
    server.until("requests/s")
    (line, *_) = [json.loads(line) for line in server.lines if "requests/s" in line]
    assert (line["logger"], line["level"]) == ("slipstream.status", "info") and "running" in line["message"]


def test_metrics_need_the_key_where_there_is_one(tiny_server):
    assert tiny_server.call("GET", "/metrics")[0] == 401
    assert samples(tiny_server, authorization="Bearer key")
