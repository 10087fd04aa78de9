"""`slipstream eval`: figures against transformers and numpy; errors."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

from slipstream.serve.cli.main import main
from tiny import write_tiny

TEXT = "The host never makes the device wait. " * 3
WINDOW = 48


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    (root / "text.txt").write_text(TEXT)
    write_tiny(root / "one", seed=0)
    write_tiny(root / "two", seed=1)
    return root


def evaluate(folders, capsys, *more):
    own = ["--model", str(folders / "one"), "--num-threads", "1", "--window", str(WINDOW), "--json"]
    assert main(["eval", str(folders / "text.txt"), *own, *more]) == 0
    return json.loads(capsys.readouterr().out)


def expected_logprobs(folder, positions):
    """Of transformers: per window, its ids and the logprobs of the token after each of them, in float64."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).double().eval()
    ids = tokenizer.encode(TEXT)[:positions]
    for start in range(0, len(ids), WINDOW):
        window = ids[start : start + WINDOW]
        with torch.no_grad():
            yield window, model(torch.tensor([window])).logits[0].log_softmax(-1).numpy()


def test_perplexity_is_that_of_transformers(folders, capsys):
    result = evaluate(folders, capsys)
    windows = list(expected_logprobs(folders / "one", None))
    scored = [table[at, token] for ids, table in windows for at, token in enumerate(ids[1:])]
    assert result["perplexity"] == pytest.approx(np.exp(-np.mean(scored)), rel=1e-5)
    assert result["positions"] == sum(len(ids) for ids, _ in windows)
    assert result["differences"] is None


def test_differences_are_those_of_the_two_distributions(folders, capsys):
    result = evaluate(folders, capsys, "--reference", str(folders / "two"), "--positions", "60")
    found = [np.concatenate([table for _, table in expected_logprobs(folders / name, 60)]) for name in ("one", "two")]
    own, reference = found
    kl = (np.exp(reference) * (reference - own)).sum(1)
    differences = result["differences"]
    assert result["positions"] == 60
    assert differences["kl_mean"] == pytest.approx(kl.mean(), rel=1e-4)
    assert differences["kl_max"] == pytest.approx(kl.max(), rel=1e-4)
    assert differences["top1"] == pytest.approx((own.argmax(1) == reference.argmax(1)).mean())
    assert 0 < differences["top1"] < 1 or differences["kl_mean"] > 1e-3, "the models differ"


def test_a_model_equals_itself(folders, capsys):
    assert main(["eval", str(folders / "text.txt"), "--model", str(folders / "one"), "--num-threads", "1",
                 "--reference", str(folders / "one")]) == 0  # fmt: skip
    out = capsys.readouterr().out
    assert "KL mean            0.000e+00 nats" in out and "same top token       100.00%" in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--positions", "99999"], "and 99999 are needed"),
        (["--window", "1"], "at least 2"),
        (["--reference", "OTHER"], "cannot be compared"),
    ],
)
def test_mistakes_are_named(folders, capsys, more, message):
    if "OTHER" in more:
        write_tiny(folders / "wide", vocab_size=320)
        more = ["--reference", str(folders / "wide")]
    code = main(["eval", str(folders / "text.txt"), "--model", str(folders / "one"), "--num-threads", "1", *more])
    assert code == 2 and message in capsys.readouterr().err


def test_a_file_that_is_no_text_is_named(folders, capsys):
    (folders / "binary").write_bytes(b"\xff\xfe\x00")
    assert main(["eval", str(folders / "binary"), "--model", str(folders / "one")]) == 2
    assert "binary: not UTF-8 text" in capsys.readouterr().err
