"""JSON schemas of the public test suite, drafts 4, 6, 7 and 2020-12 (tests/data/json_schema_suite.json): refused for a
listed reason, or every output that ends is valid, whatever the model wants, at depth 0, 1 and 2, also with drafts,
several samples and preemption."""

from __future__ import annotations

import json
import random
import zlib

import pytest
from test_draft_masks import preempting

import scripted
from letter_tokenizer import END, TOKENIZER, make_constraints
from schema_suite import SUITE, breaks_schema, compiled_schemas, is_valid, shape_of
from scripted_engine import scripted_core, submit
from slipstream.contracts.request import FinishReason

_WANTED = [*TOKENIZER.encode('"]}0,e:a-1[{nt'), END]


def lazy(tokens, seed, sample):
    """A model that wants to end, most of the time where it may not."""
    return _WANTED[zlib.crc32(bytes(tokens)) % len(_WANTED)]


@pytest.fixture(scope="module")
def compiled():
    grammars = make_constraints().grammars
    found = compiled_schemas(grammars)
    grammars.close()
    return found


def test_most_schemas_compile_and_the_others_are_refused_for_known_reasons(compiled):
    assert len(SUITE) == 721 and len(compiled) >= 400


@pytest.mark.every_second("depth", "is_mixed")
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["plain", "drafts, samples and preemption"])
def test_every_output_that_ends_is_valid(compiled, depth, is_mixed, monkeypatch):
    monkeypatch.setattr(scripted, "draw", lazy)
    core = scripted_core(
        depth, max_num_seqs=16, max_model_len=96, num_pages=300, max_waiting=10**4, constraints=make_constraints(16)
    )
    if is_mixed:
        compiled = compiled[depth::3]  # each schema at one depth
        device = core.executor.executor
        device.drafter = random.Random(depth)
        device._guess = lambda state, last: device.drafter.choices([*_WANTED, -1], k=8)
        core.scheduler.drafts.num_drafts = core.scheduler.drafts.num_proposed = 2
        preempting(core)
    for index, entry in enumerate(compiled):
        params = dict(structured_outputs=shape_of(entry), stop_token_ids=[END], max_tokens=64, n=1 + is_mixed)
        core.submit(submit(f"{index}", [1 + index % 90, index // 90], **params))
    texts, wrong, num_valid = {}, [], 0
    while core.has_requests():
        for output in core.step():
            key = output.request_id, output.sample
            texts[key] = texts.get(key, []) + output.token_ids
            if output.finish_reason is FinishReason.STOP:
                entry, text = compiled[int(output.request_id)], TOKENIZER.decode(texts[key])
                num_valid += is_valid(entry, json.loads(text))
                if breaks_schema(entry, text):
                    wrong.append((entry["file"], entry["description"], entry["schema"], text))
            else:
                assert output.finish_reason in (None, FinishReason.LENGTH), output
    core.close()
    assert wrong == []
    assert num_valid >= (200 if is_mixed else 300)
    if is_mixed:
        assert device.num_accepted > 50 and device.num_rejected > 100 and core.scheduler.num_preemptions > 15
