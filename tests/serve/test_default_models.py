"""`slipstream serve` and nothing more: the default chat model and the default embedder in one server."""

from __future__ import annotations

import base64
import io
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from serve.server_process import ServerProcess
from slipstream import LLM
from slipstream.base.errors import ModelNotFound
from slipstream.checkpoint.locate import DEFAULT_NAME, default_embedder, locate
from slipstream.params.pooling import PoolingParams
from slipstream.serve.cli.commands import MODULES, make_parser
from slipstream.serve.cli.main import main

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    try:
        locate(None), default_embedder()
    except ModelNotFound as error:
        pytest.skip(f"needs the default models: {error}")
    server = ServerProcess("--max-model-len", "256", "--num-pages", "64")
    yield server
    assert server.stop() == 0, server.lines[-5:]


def test_both_are_listed_and_each_route_finds_its_own(server):
    names = [card["id"] for card in server.call("GET", "/v1/models")[1]["data"]]
    assert len(names) == 2 and "SmolLM2" in names[0] and names[1] == "all-MiniLM-L6-v2"
    _, chat = server.call("POST", "/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    _, embedded = server.call("POST", "/v1/embeddings", {"input": "Hello"})
    assert (chat["model"], embedded["model"]) == (names[0], names[1])
    assert server.call("GET", "/info")[1]["model_id"] == names[1]


def test_vectors_are_those_of_the_script_api_and_rerank_works_on_them(server):
    texts = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    with LLM(task="embed", use_tqdm_on_load=False, num_threads=1) as llm:
        wanted = [one.outputs.data for one in llm.embed(texts, use_tqdm=False)]
    for given in (texts, texts[0]):
        _, answer = server.call("POST", "/v1/embeddings", {"input": given, "encoding_format": "base64"})
        found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in answer["data"]]
        np.testing.assert_allclose(found, wanted[: len(found)], atol=1e-5)
    _, ranked = server.call("POST", "/v2/rerank", {"query": texts[0], "documents": texts[1:]})
    assert [one["index"] for one in ranked["results"]] == [0, 1]
    assert ranked["results"][0]["relevance_score"] == pytest.approx(float(wanted[0] @ wanted[1]), abs=1e-5)
    long = "sunny " * 2000  # more than the folder says it reads
    status, refused = server.call("POST", "/v1/embeddings", {"input": long})
    assert status == 400 and "reads 256" in refused["error"]["message"]
    _, cut = server.call("POST", "/v1/embeddings", {"input": long, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == 256
    lengths = {each["id"]: each["max_model_len"] for each in server.call("GET", "/v1/models")[1]["data"]}
    assert lengths["all-MiniLM-L6-v2"] == 256
    assert len(server.call("POST", "/embed", {"inputs": long})[1][0]) == 384  # TEI's way: cut, as /info says
    status, refused = server.call("POST", "/embed", {"inputs": long, "truncate": False})
    assert status == 413 and "256" in refused["error"]


def blocks(page, language=""):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def commands(page):
    """The lines of its shell blocks, without what follows a #."""
    lines = [re.sub(r"\s+#.*", "", line) for block in blocks(page) for line in block.splitlines()]
    return [line for line in lines if line.startswith(("slipstream", "scripts/chat", "curl"))]


PAGES = ("README.md", "docs/start.md", "docs/how-to.md")
SERVED = ("slipstream serve", "slipstream top", "curl")  # with a server, below
NOT_RUN = ("slipstream bench", "slipstream eval", "slipstream replay")  # long, or of a file that the page does not have
SHELL = [(page, line) for page in PAGES for line in commands(page)]


@pytest.fixture
def place(tmp_path, monkeypatch, server):
    """A working folder with the files that the pages name."""
    monkeypatch.chdir(tmp_path)
    for name, target in (("to/model", locate(None).path), ("one", locate(None).path), ("two", default_embedder().path)):
        folder = tmp_path / "path" / name
        folder.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            folder.symlink_to(target)
        else:
            folder.mkdir()
            (folder / target.name).symlink_to(target)
    Path("prompts.txt").write_text("What is 2 and 2?\n")
    Path("person.json").write_text(
        '{"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}'
    )
    manifest = tmp_path / "ollama/manifests/registry.ollama.ai/library/llama3.2/1b"
    manifest.parent.mkdir(parents=True)
    (tmp_path / "ollama/blobs").mkdir()
    (tmp_path / "ollama/blobs/sha256-1").symlink_to(locate(None).path)
    manifest.write_text('{"layers": [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:1"}]}')
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    Path("documents.txt").write_text("Trams run on rails.\nYeast gives off gas.\n")
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    Path("in.jsonl").write_text(json.dumps(line))


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize(("page", "line"), [each for each in SHELL if not each[1].startswith((*SERVED, *NOT_RUN))])
def test_a_command_of_a_page_runs_as_written(page, line, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello"))  # for `slipstream chat`, a conversation on a terminal
    if line.startswith("scripts/chat"):
        assert 'slipstream" chat "$@"' in (ROOT / "scripts/chat").read_text()
        line = line.replace("scripts/chat", "slipstream chat")
    short = ["--max-tokens", "16"] if " chat" in line or " generate" in line else []
    assert main([*shlex.split(line)[1:], "--num-threads", "1", *short]) == 0
    assert capsys.readouterr().out.strip() or "run-batch" in line


def test_every_command_of_the_pages_is_run_or_named_here():
    assert {line.split()[1] for _, line in SHELL if "slipstream" in line} == MODULES.keys() - {"score", "version"}
    assert all(any(line.startswith(each) for _, line in SHELL) for each in (*SERVED, *NOT_RUN))


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
def test_the_request_of_the_readme_is_answered(server, capsys):
    (line,) = [line for line in commands("README.md") if line.startswith("curl")]
    done = subprocess.run(
        shlex.split(line.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")), capture_output=True, text=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"], done.stderr
    top = next(line for _, line in SHELL if line.startswith("slipstream top"))
    argv = top.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").split()[1:]
    assert main([*argv, "--once"]) == 0 and DEFAULT_NAME in capsys.readouterr().out


@pytest.mark.skipif(not shutil.which("curl"), reason="needs curl")
@pytest.mark.parametrize("line", [line for line in commands("docs/how-to.md") if line.startswith("curl")])
def test_the_requests_of_the_how_to_page_are_answered(server, line):
    argv = [*shlex.split(line.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")), "--fail"]
    answer = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    if "json_schema" in line:
        assert json.loads(json.loads(answer)["choices"][0]["message"]["content"])["age"] >= 0
    assert answer


@pytest.mark.usefixtures("place")
def test_servers_of_the_how_to_page_have_the_flags_and_models_that_it_names():
    for line in commands("docs/how-to.md"):
        if line.startswith(("slipstream serve", *NOT_RUN)):
            args = make_parser(argv := shlex.split(line)[1:]).parse_args(argv)
            for model in getattr(args, "models", ()):
                assert model.startswith("path/to") or locate(model)


@pytest.mark.usefixtures("place")
def test_the_recipe_of_the_how_to_page_answers(capsys):
    (recipe,) = blocks("docs/how-to.md", "python")
    assert len(recipe.splitlines()) <= 32
    exec(recipe, {})
    assert "platform 2" in capsys.readouterr().out


def test_names_of_sentence_transformers_mean_the_same_here():
    theirs = pytest.importorskip("sentence_transformers")
    path = str(default_embedder().path)
    texts = ["Trams run on rails.", "A tram is a train in a street.", "Yeast gives off gas."]
    rows = re.findall(r"^\| (`.*) \| `(.*)` \|$", (ROOT / "docs/coming-from.md").read_text(), flags=re.MULTILINE)
    pairs = [(own, here) for there, here in rows for own in re.findall(r"`([^`]+)`", there)]
    data = re.compile(r"\b(texts|a)\b")  # what the columns have in common
    pairs = [(own, here) for own, here in pairs if data.search(own) and data.search(here)]
    assert len(pairs) == 9
    with LLM(path, task="embed", use_tqdm_on_load=False, num_threads=1) as llm:
        model = theirs.SentenceTransformer(path, device="cpu")
        names = {"np": np, "llm": llm, "PoolingParams": PoolingParams, "util": theirs.util, "model": model}
        names |= {"texts": texts, "a": model.encode(texts), "check": np.testing.assert_allclose}
        for own, here in pairs:
            exec(f"check({here}, {own}, atol=1e-5, err_msg={own!r})", names)


@pytest.mark.usefixtures("place")
def test_the_python_of_the_start_page_runs_as_written(capsys):
    scripts = blocks("docs/start.md", "python")
    (client,) = [script for script in scripts if "OpenAI" in script]
    exec(next(script for script in scripts if "OpenAI" not in script), {})
    assert "Yeast gives off gas." in capsys.readouterr().out
    pytest.importorskip("openai")
    (line,) = [line for line in commands("docs/start.md") if line.startswith("slipstream serve")]
    server = ServerProcess(*shlex.split(line)[2:], "--max-model-len", "96")  # the answer is not looked at
    exec(client.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"), {})
    assert server.stop() == 0 and "ChatCompletion(" in capsys.readouterr().out
