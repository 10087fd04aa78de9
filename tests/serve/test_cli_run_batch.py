"""`slipstream run-batch` over a scripted core: results, errors by line, and its continuation after kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from child import child_env
from patience import PATIENCE
from scripted_core import EVERY_TASK, ScriptedCore, facts
from serve.samples import MESSAGES
from slipstream.base.errors import UserError
from slipstream.serve.cli import run_batch
from slipstream.serve.cli.run_batch import BatchOutput

RUN_LINES = run_batch._run_lines


def run_lines_scripted(folder, log=None, dies_after=None):
    """Returns a replacement of `_run_lines`: the engine has a scripted core. `log` gets the prompts that were run.
    The process kills itself after this many results, the last one written half."""

    async def run_lines(engine, source, output, *rest):
        add = output.add

        def add_and_die(place, result):
            add(place, result)
            if len(output.starts) == dies_after:
                output._file.write(b'99\t{"id": "half')
                output._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)

        output.add = add_and_die
        engine, core = await ScriptedCore.open(facts(folder), facts(folder, "pool", pooling=EVERY_TASK))
        try:
            await RUN_LINES(engine, source, output, *rest)
        finally:
            if log is not None:
                log.extend(bytes(i for i in each.prompt_token_ids if i < 256) for each in core.submits)

    return run_lines


@pytest.fixture
def batch(tmp_path, folder, terminal, monkeypatch):
    """Writes lines to a file and runs them. Returns (exit code, results, stderr, prompts that were run)."""
    monkeypatch.setattr(run_batch, "open_engine", lambda options: None)
    monkeypatch.setattr(run_batch, "check_paths", lambda options, look_up: None)

    def run(lines, *flags):
        log = []
        monkeypatch.setattr(run_batch, "_run_lines", run_lines_scripted(folder, log))
        source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        source.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        code, _, err = terminal.run("run-batch", "tiny=model", "-i", str(source), "-o", str(target), *flags)
        results = [json.loads(line) for line in target.read_text().splitlines()] if target.exists() else None
        return code, results, err, log

    return run


def line(name, url="/v1/completions", **body):
    return {"custom_id": name, "method": "POST", "url": url, "body": body or {"prompt": name, "max_tokens": 3}}


def test_each_line_gets_the_answer_of_its_route(batch):
    lines = [
        line("text"),
        line("chat", "/v1/chat/completions", messages=MESSAGES, max_tokens=3),
        line("vector", "/v1/embeddings", input="hello"),
        line("rank", "/v1/rerank", query="q", documents=["a", "b"]),
        line("score", "/v1/score", text_1="a", text_2="b"),
        "",
        line("bad", "/v1/completions", prompt="x", best_of=2),
    ]
    code, results, err, _ = batch(lines, "--concurrency", "2")
    assert code == 0 and "6 lines" in err and "1 with errors" in err
    assert err.splitlines()[-1].startswith("the first error: bad: best_of ")
    assert [each["custom_id"] for each in results] == ["text", "chat", "vector", "rank", "score", "bad"]
    answers = {each["custom_id"]: each["response"] for each in results}
    assert all(each["error"] is None and each["response"]["request_id"] == each["id"] for each in results)
    assert answers["text"]["body"]["choices"][0]["text"] == "All"
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == "All"
    assert len(answers["vector"]["body"]["data"][0]["embedding"]) == 8
    assert len(answers["rank"]["body"]["results"]) == 2 and len(answers["score"]["body"]["data"]) == 1
    assert answers["bad"]["status_code"] == 400 and answers["bad"]["body"]["error"]["param"] == "best_of"


@pytest.mark.parametrize("url", ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v2/rerank"])
def test_a_run_without_any_result_fails_and_says_why(batch, url):
    code, results, err, _ = batch([line("a", url, nonsense=1), line("b", url, nonsense=1)])
    assert code == 1 and len(results) == 2
    counts, first = err.splitlines()[-2:]
    assert counts.endswith("2 with errors") and first.startswith("the first error: a: ") and "{" not in first


def test_a_byte_order_mark_is_no_part_of_the_first_line(batch):
    code, results, err, _ = batch(["\ufeff" + json.dumps(line("a")), line("b")])
    assert code == 0 and [each["response"]["status_code"] for each in results] == [200, 200], err


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "line 1: the line is not JSON"),
        ([line("a"), line("a")], "custom_id 'a' is that of line 1 too"),
        ([line("a", "/v1/nothing", prompt="x")], "give one of /v1/chat/completions"),
        ([line("a") | {"method": "GET"}], "give POST"),
        ([line("a") | {"extra": 1}], "extra"),
        ([line("a", prompt="x", stream=True)], "a batch has no streams"),
        ([line("")], "custom_id has 0 characters"),
        ([], "has no lines"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused_before_the_model_is_loaded(batch, lines, words):
    code, results, err, log = batch(lines)
    assert code == 2 and words in err and results is None and log == []


def test_a_finished_output_is_not_overwritten_unasked(batch):
    assert batch([line("a")])[0] == 0
    code, _, err, log = batch([line("b")])
    assert code == 2 and "--overwrite" in err and log == []
    assert batch([line("b")], "--overwrite")[1][0]["custom_id"] == "b"


_CHILD = """
import sys
from pathlib import Path
from serve import test_cli_run_batch as tests
from slipstream.serve.cli import main, run_batch
run_batch.open_engine = lambda options: None
run_batch.check_paths = lambda options, look_up: None
run_batch._run_lines = tests.run_lines_scripted(Path(sys.argv[1]), dies_after=4)
main.main(sys.argv[2:])
"""


def test_a_killed_run_continues_without_a_line_twice_or_lost(batch, folder, tmp_path):
    lines = [line(f"line{place}") for place in range(9)]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))
    argv = ["run-batch", "tiny=model", "-i", str(source), "-o", str(target), "--concurrency", "3"]
    killed = subprocess.run([sys.executable, "-c", _CHILD, str(folder), *argv], env=child_env(), timeout=PATIENCE)
    assert killed.returncode == -signal.SIGKILL and not target.exists()
    part = (tmp_path / "out.jsonl.part").read_text().splitlines()
    kept = {json.loads(entry.partition("\t")[2])["custom_id"] for entry in part[1:5]}
    assert len(part) == 6 and len(kept) == 4

    code, results, err, log = batch(lines)
    assert code == 0 and "4 of 9 lines have a result" in err
    assert sorted(log) == sorted(each["custom_id"].encode() for each in lines if each["custom_id"] not in kept)
    assert [each["custom_id"] for each in results] == [each["custom_id"] for each in lines]
    assert all(each["response"]["status_code"] == 200 for each in results)
    assert not list(tmp_path.glob("out.jsonl.*"))


def test_an_input_that_cannot_be_read_any_more_is_an_error_of_one_line(batch, monkeypatch):
    """Also in the middle of a run; the results so far stay."""
    numbered, reads = run_batch._numbered, []

    def failing(path):
        reads.append(path)
        for place, found in enumerate(numbered(path)):
            if len(reads) == 2 and place == 2:
                raise UserError(f"cannot read {path}: Input/output error")
            yield found

    monkeypatch.setattr(run_batch, "_numbered", failing)
    code, results, err, log = batch([line(f"{place}") for place in range(4)])
    assert code == 2 and results is None and err.splitlines()[-1].endswith("Input/output error") and len(log) == 2
    assert batch([line(f"{place}") for place in range(4)])[3] == [b"2", b"3"]


def test_results_of_another_input_are_not_continued(batch, tmp_path):
    part = tmp_path / "out.jsonl.part"
    part.write_text('{"slipstream_batch": 1, "input_sha256": "0", "models": ["tiny"]}\n')
    code, _, err, log = batch([line("a")])
    assert code == 2 and "another input" in err and log == []
    part.write_text("something else\n")
    assert "was not written by run-batch" in batch([line("a")])[2]
    assert batch([line("a")], "--overwrite")[0] == 0
    part.write_text("a file of the user without a line end")
    assert "was not written by run-batch" in batch([line("b")])[2]
    assert part.read_text() == "a file of the user without a line end"


@pytest.mark.parametrize(
    "damage",
    [
        b"x\t{}\n",
        b"nothing\n",
        b'1\t{"id": "half0\t{"a": 1}\n',
        b"99\t{}\n",
        b"1\t[]\n",
        b"-1\t{}\n",
        b"\0" * 50 + b"\n",
    ],
)
def test_damaged_results_are_run_again(batch, tmp_path, monkeypatch, damage):
    """A write that a full disk cut, with others behind it; zeros of a power failure."""
    lines, part = [line(f"{place}") for place in range(3)], tmp_path / "out.jsonl.part"
    finish = BatchOutput.finish
    monkeypatch.setattr(BatchOutput, "finish", lambda self: None)
    assert batch(lines)[0] == 0
    monkeypatch.setattr(BatchOutput, "finish", finish)
    head, first, second, third = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(head + first + damage + third)
    code, results, err, log = batch(lines)
    assert code == 0 and log == [b"1"] and "2 of 3 lines have a result" in err
    assert [each["custom_id"] for each in results] == ["0", "1", "2"]


def test_parser_flags(batch):
    body = {"messages": MESSAGES, "max_tokens": 13, "tools": TOOLS}
    lines = [line("a", "/v1/chat/completions", **body)]
    code, results, _, _ = batch(lines, "--no-enable-auto-tool-choice", "--reasoning-parser", "qwen3")
    assert code == 1 and results[0]["response"]["status_code"] == 400
    assert results[0]["response"]["body"]["error"]["param"] == "tool_choice"
    code, _, err, _ = batch(lines, "--tool-call-parser", "nonsense", "--overwrite")
    assert code == 2 and "nonsense" in err


TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
