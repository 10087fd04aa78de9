"""`chat --url` and `bench serve`, against a real server."""

from __future__ import annotations

import json

import pytest

from slipstream.serve.bench.online import Answer, histogram, summarise
from slipstream.serve.cli.chat import _text


@pytest.fixture
def key(monkeypatch):
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "key")


def test_chat_talks_to_a_server(terminal, tiny_server, key):
    argv = ("--url", tiny_server.url, "--temperature", "0", "--max-tokens", "8")
    code, out, _ = terminal.run("chat", "Hello", *argv)
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 8}
    wanted = tiny_server.call("POST", "/v1/chat/completions", body, authorization="Bearer key")[1]
    assert code == 0 and out == wanted["choices"][0]["message"]["content"] + "\n"
    assert terminal.llm is None  # nothing was loaded here


@pytest.mark.parametrize(
    ("argv", "code", "words"),
    [
        (("--url", "ftp://x"), 2, "give one like http://"),
        (("--url", "http://127.0.0.1:1"), 1, "cannot be reached"),
        (("--url", "http://127.0.0.1:1", "--page-size", "8"), 2, "cannot be set with --url"),
    ],
)
def test_chat_tells_what_is_wrong_with_a_url(terminal, argv, code, words):
    got, _, err = terminal.run("chat", "Hello", *argv)
    assert got == code and words in err and len(err.splitlines()) == 1


def test_a_conversation_with_a_server_shows_its_model_and_speed(terminal, tiny_server, key):
    argv = ("--url", tiny_server.url, "--max-tokens", "8")
    code, out, err = terminal.run(
        "chat", *argv, stdin="Hello\n/set max_tokens 3\n/set ignore_eos true\nHello\n", tty=True
    )
    assert code == 0 and err.startswith(f"{tiny_server.url}. Type a message")
    assert "[3 tokens, " in err.splitlines()[-1]


def test_chat_passes_on_what_the_server_says(terminal, tiny_server, key):
    code, _, err = terminal.run("chat", "Hello", "--url", tiny_server.url, "--model", "other")
    assert code == 2 and "404" in err and "other" in err


def test_chat_takes_what_remains_of_a_short_context(terminal, tiny_server, key):
    """The default of --max-tokens is more than the server's model takes."""
    code, out, err = terminal.run("chat", "Hello", "--url", tiny_server.url, "--temperature", "0")
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0}
    wanted = tiny_server.call("POST", "/v1/chat/completions", body, authorization="Bearer key")[1]
    assert code == 0 and out == wanted["choices"][0]["message"]["content"] + "\n", err
    code, _, err = terminal.run("chat", "Hello " * 300, "--url", tiny_server.url)
    assert code == 2 and "the server said 400: the prompt has" in err


@pytest.mark.parametrize("how", [("--concurrency", "3"), ("--rate", "200")])
def test_bench_serve_counts_what_it_sent(terminal, tiny_server, key, how):
    argv = ("--num-prompts", "8", "--input-len", "5", "--output-len", "4", *how)
    code, out, _ = terminal.run("bench", "serve", "--url", tiny_server.url, *argv, "--json")
    found = json.loads(out)["result"]
    assert code == 0 and found["statuses"] == {"200": 8} and found["output_tokens"] == 32
    assert found["ttft_ms"]["p50"] <= found["request_ms"]["p50"]
    code, out, _ = terminal.run("bench", "serve", "--url", tiny_server.url, *argv, "--plot")
    assert code == 0 and "8 x 200" in out and "first token, ms" in out


def test_top_shows_a_running_server_once(terminal, tiny_server, key):
    code, out, _ = terminal.run("top", tiny_server.url, "--once")
    assert code == 0 and "steps/s" in out and "no requests" in out and "0 running" in out
    code, _, err = terminal.run("top", "http://127.0.0.1:1")
    assert code == 1 and "cannot be reached" in err


def test_bench_serve_without_a_server_is_one_line(terminal):
    code, _, err = terminal.run("bench", "serve", "--num-prompts", "1")
    assert code == 2 and "--url" in err
    code, _, err = terminal.run("bench", "serve", "--url", "http://127.0.0.1:1", "--num-prompts", "1")
    assert code == 1 and "no request succeeded" in err


def test_a_report_tells_refusals_and_broken_streams_apart():
    answers = [
        Answer(200, 0.0, [1.0, 1.5], 2.0, 2),
        Answer(200, 0.0, [1.0], 2.0, 0, "the engine has ended"),
        Answer(429, 0.0, [], 0.01),
        Answer(0, 0.0, [], 0.5, 0, "refused"),
    ]
    found = summarise(answers, 4.0)
    assert found.statuses == {"200": 2, "429": 1, "broken": 1} and found.num_failed == 1
    assert (found.requests_per_second, found.output_tokens) == (0.25, 2)
    assert found.refused_ms.p50 == pytest.approx(10) and found.itl_ms.mean == pytest.approx(500)
    assert any("failed after they started" in line for line in found.lines())


def test_a_histogram_counts_everyone():
    lines = histogram([0.001, 0.001, 0.002, 0.01], "first token")
    assert sum(int(line.rpartition(" ")[2]) for line in lines if "#" in line) == 4
    assert histogram([], "x") == [] and histogram([1.0], "x")


@pytest.mark.parametrize(
    ("deltas", "text"),
    [
        ([{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}], "ab"),
        ([{"reasoning": "h"}, {"reasoning": "m", "reasoning_content": "m"}, {"content": "a"}, {"content": "b"}], "ab"),
        ([{"reasoning": "hm", "content": "ab"}], "ab"),
    ],
)
def test_chat_shows_reasoning_between_tags(deltas, text):
    shown = ""
    for delta in deltas:
        shown += _text(delta, shown)
    has_reasoning = any("reasoning" in delta for delta in deltas)
    assert shown == (f"<think>\nhm\n</think>\n\n{text}" if has_reasoning else text)
