import json

import numpy as np

from serve.fake_llm import FakeLLM
from slipstream.front.pooling_results import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RerankResult,
    ScoringOutput,
    ScoringRequestOutput,
)


class PoolingLLM(FakeLLM):
    """Vectors tell how long a text is; texts go together as well as their lengths do."""

    def embed(self, prompts, params, *, prompt_name=None, use_tqdm=True):
        self.prompts += prompts
        self.params.append(params)
        self.prompt_name = prompt_name
        size = params.dimensions or 3
        sizes = [len(prompt if isinstance(prompt, str) else prompt["prompt_token_ids"]) for prompt in prompts]
        made = [np.full(size, length / 7, np.float32) for length in sizes]
        return [EmbeddingRequestOutput("r", EmbeddingOutput(vector), [1, 2]) for vector in made]

    def score(self, first, others, params, *, use_tqdm=True, **how):
        self.params.append(params)
        self.how = how
        return [ScoringRequestOutput("r", ScoringOutput(-abs(len(first) - len(o)) / 4), [1]) for o in others]

    def rerank(self, query, documents, top_n, params, *, use_tqdm=True, **how):
        scores = [one.outputs.score for one in self.score(query, documents, params, **how)]
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[:top_n]
        return [RerankResult(i, scores[i], documents[i]) for i in order]


def test_vectors_are_lines_of_numbers(terminal):
    terminal.kind = PoolingLLM
    assert terminal.run("embed", "seven", "a") == (0, "0.714286 0.714286 0.714286\n0.142857 0.142857 0.142857\n", "")
    assert terminal.llm.options == {"task": "embed"} and terminal.llm.closed


def test_texts_from_standard_input_and_flags(terminal):
    terminal.kind = PoolingLLM
    flags = ("--prompt-name", "query", "--dimensions", "2", "--truncate-prompt-tokens", "-1", "--model", "m")
    code, out, _ = terminal.run("embed", "--json", *flags, stdin='{"text": "ab"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["index"] for line in lines] == [0, 1]
    assert lines[0]["text"] == "ab" and lines[1]["prompt_token_ids"] == [5, 6, 7]
    assert np.float32(lines[1]["embedding"][1]) == np.float32(3 / 7)  # nothing is lost on the way
    assert terminal.llm.prompt_name == "query" and terminal.llm.options["model"] == "m"
    (params,) = terminal.llm.params
    assert (params.task, params.dimensions, params.truncate_prompt_tokens) == ("embed", 2, -1)


def test_vectors_into_files(terminal, tmp_path):
    terminal.kind = PoolingLLM
    texts = tmp_path / "texts"
    texts.write_text("one\nthree\n")
    assert terminal.run("embed", "--file", str(texts), "--output", str(tmp_path / "v.npy")) == (0, "", "")
    assert np.load(tmp_path / "v.npy").shape == (2, 3)
    assert terminal.run("embed", "one", "--output", str(tmp_path / "v.jsonl"))[0] == 0
    assert json.loads((tmp_path / "v.jsonl").read_text())["text"] == "one"


def test_mistakes_are_found_before_the_model_is_opened(terminal, tmp_path):
    terminal.kind = PoolingLLM
    code, _, err = terminal.run("embed", "a", "--dimensions", "0")
    assert code == 2 and "dimensions is 0" in err and terminal.llm is None
    code, _, err = terminal.run("embed", "a", "--json", "--output", str(tmp_path / "x"))
    assert code == 2 and "remove one of them" in err and terminal.llm is None
    for command, what in ((["embed"], "text"), (["rerank", "q"], "document"), (["score", "a"], "other text")):
        code, _, err = terminal.run(*command, tty=True)
        assert code == 2 and f"there is no {what}" in err and terminal.llm is None


def test_a_file_that_cannot_be_written(terminal, tmp_path):
    terminal.kind = PoolingLLM
    code, _, err = terminal.run("embed", "a", "--output", str(tmp_path / "no" / "v.npy"))
    assert code == 2 and "there is no folder" in err and terminal.llm is None
    (tmp_path / "v.npy").mkdir()
    code, _, err = terminal.run("embed", "a", "--output", str(tmp_path / "v.npy"))
    assert code == 2 and "cannot write" in err and terminal.llm.closed


def test_documents_come_best_first(terminal):
    terminal.kind = PoolingLLM
    out = terminal.run("rerank", "abc", "a", "abcd", "ab")[1]
    assert out == "-0.250000\t1\tabcd\n-0.250000\t2\tab\n-0.500000\t0\ta\n"
    assert terminal.llm.options == {"task": "rerank"}
    out = terminal.run("rerank", "abc", "--top-n", "1", "--json", "--instruction", "look", stdin="a\nabc\n")[1]
    assert json.loads(out) == {"index": 1, "score": 0.0, "document": "abc"} and terminal.llm.how == {
        "instruction": "look"
    }


def test_scores_one_a_line(terminal):
    terminal.kind = PoolingLLM
    assert terminal.run("score", "abc", "abcd", "abc") == (0, "-0.250000\n0.000000\n", "")
    code, out, _ = terminal.run("score", "abc", "--json", stdin="ab\n")
    assert code == 0 and json.loads(out) == {"index": 0, "first": "abc", "second": "ab", "score": -0.25}
    code, _, err = terminal.run("score", "abc", stdin='{"prompt_token_ids": [1]}')
    assert code == 2 and "give texts" in err
