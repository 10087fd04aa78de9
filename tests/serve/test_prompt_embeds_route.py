"""prompt_embeds of /v1/completions: tensors as torch.save writes them, in base64."""

from __future__ import annotations

import base64
import io
import pickle
import re
import zipfile

import numpy as np
import pytest
import torch

from serve.asgi import at_door
from tiny_tokenizer import write_byte_tokenizer

VALUES = torch.arange(24, dtype=torch.float32).view(3, 8) / 7


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    write_byte_tokenizer(path)
    return path


def encoded(value):
    saved = io.BytesIO()
    torch.save(value, saved)
    return base64.b64encode(saved.getvalue()).decode()


def complete(folder, embed_size=8, **body):
    async def scenario(door):
        answer = await door.post("/v1/completions", {"max_tokens": 4, **body})
        return answer, door.core.submits

    return at_door(folder, scenario, model={"embed_size": embed_size})


def values_of(submit):
    assert submit.prompt_token_ids == [0] * submit.prompt_embeds.shape[0]
    return submit.prompt_embeds.array()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_tensor_of_any_float_dtype_reaches_the_engine(folder, dtype):
    given = VALUES.to(dtype)
    answer, submits = complete(folder, prompt_embeds=encoded(given))
    assert answer.status == 200 and answer.json()["usage"]["prompt_tokens"] == 3
    np.testing.assert_array_equal(values_of(submits[0]), given.float().numpy())


def test_embeddings_come_before_texts(folder):
    wide = torch.arange(64.0).view(8, 8)
    answer, submits = complete(folder, prompt_embeds=[encoded(VALUES), encoded(wide.T[2:])], prompt=["ab", "c"])
    assert answer.status == 200 and len(answer.json()["choices"]) == 4
    np.testing.assert_array_equal(values_of(submits[0]), VALUES.numpy())
    np.testing.assert_array_equal(values_of(submits[1]), wide.T[2:].numpy())
    assert [submit.prompt_token_ids for submit in submits[2:]] == [[*b"ab"], [*b"c"]]
    assert submits[0].cache_salt != submits[1].cache_salt and not submits[2].prompt_embeds


class Attack:
    def __reduce__(self):
        return (eval, ("1 + 1",))


def _zip(entries, **how):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", **how) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return base64.b64encode(buffer.getvalue()).decode()


def _cut(value):
    """A saved tensor whose storage is shorter than its shape says."""
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(encoded(value)))) as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    return _zip({name: data[:-4] if "/data/" in name else data for name, data in found.items()})


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"prompt_embeds": "%%%"}, "prompt_embeds", "not base64"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds", "cannot be read"),
        ({"prompt_embeds": []}, "prompt_embeds", "empty"),
        ({"prompt_embeds": "A" * 200_000}, "prompt_embeds", "characters"),
        ({"prompt_embeds": _zip({"archive/data.pkl": pickle.dumps(Attack())})}, "prompt_embeds", "eval"),
        ({"prompt_embeds": _zip({"a": b"0" * 99}, compression=8)}, "prompt_embeds", "compressed"),
        ({"prompt_embeds": _cut(VALUES)}, "prompt_embeds", "too short"),
        ({"prompt_embeds": encoded({"a": VALUES})}, "prompt_embeds", "not one tensor"),
        ({"prompt_embeds": encoded(VALUES.to_sparse())}, "prompt_embeds", "sparse"),
        ({"prompt_embeds": encoded(VALUES.long())}, "prompt_embeds", "int64"),
        ({"prompt_embeds": encoded(VALUES[:, :5])}, "prompt_embeds", r"\[3, 5\]"),
        ({"prompt_embeds": encoded(torch.zeros(64, 8))}, "prompt_embeds", "64 tokens"),
        ({"prompt_embeds": encoded(VALUES), "echo": True}, "echo", "echo"),
        ({"prompt_embeds": encoded(VALUES), "suffix": "x"}, "suffix", "suffix"),
        ({"prompt_embeds": encoded(VALUES), "prompt_logprobs": 1}, "prompt_logprobs", "token ids"),
        ({"prompt_embeds": encoded(VALUES), "use_beam_search": True}, "prompt_embeds", "use_beam_search"),
        ({}, "prompt", "prompt"),
    ],
)  # fmt: skip
def test_anything_else_is_refused(folder, body, param, words):
    answer, submits = complete(folder, **body)
    assert answer.status == 400 and not submits
    assert answer.json()["error"]["param"] == param
    assert re.search(words, answer.error), answer.error


def test_a_server_without_the_option_names_it(folder):
    answer, _ = complete(folder, embed_size=0, prompt_embeds=encoded(VALUES))
    assert answer.status == 400 and "--enable-prompt-embeds" in answer.error
