"""JSON schemas of the public test suite, drafts 4, 6, 7 and 2020-12 (tests/data/json_schema_suite.json): refused for a
listed reason, or every output that ends is valid, whatever the model wants, at depth 0, 1 and 2, also with drafts,
several samples and preemption."""

from __future__ import annotations

import json
import random
import re
import zlib
from pathlib import Path

import jsonschema_rs
import pytest
from test_draft_masks import preempting

import scripted
from letter_tokenizer import END, TOKENIZER, make_constraints
from scripted_engine import scripted_core, submit
from slipstream.errors import InvalidParams
from slipstream.request import FinishReason
from slipstream.structured_params import StructuredOutputsParams as Shape

SUITE = json.loads((Path(__file__).parents[2] / "data" / "json_schema_suite.json").read_text())
REFUSED = {
    "keywords that need more than the text so far: what is not there, what was there before, or how often": (
        r"Unimplemented keys"
    ),
    "schemas on other servers are not fetched": r"Resource '.*' is not present|Anchor '.*' does not exist|Pointer",
    "nothing matches them": r"nsatisfiable|schema is false|no JSON matches|no text matches",
    "formats that llguidance has no grammar for": r"Unknown format",
    "bounds of numbers that are no regular expression of reasonable size": r"float range|too many digits|multipleOf",
    "counts as numbers with a fraction": r"Expected positive integer",
    "ECMAScript's regular expressions that Rust's syntax lacks": r"regex parse error|Unable to determine|look-around",
    "overlapping patternProperties": r"are not disjoint",
}
# keywords that compile and are not enforced
NOT_ENFORCED = {
    '"oneOf"': "read as anyOf: that no second alternative matches is no grammar of the text so far",
    '"contentMediaType"': "an annotation; only some validators check it",
    '"contentEncoding"': "an annotation; only some validators check it",
    "sibling_id": "up to draft 7 an $id beside $ref has no effect; without $schema a schema is read as of 2020-12",
}
_WANTED = [*TOKENIZER.encode('"]}0,e:a-1[{nt'), END]


def lazy(tokens, seed, sample):
    """A model that wants to end, most of the time where it may not."""
    return _WANTED[zlib.crc32(bytes(tokens)) % len(_WANTED)]


def shape_of(entry):
    return Shape(json=entry["schema"], disable_any_whitespace=True)


@pytest.fixture(scope="module")
def compiled():
    """The schemas that compile; the others by reason."""
    grammars, found, refused = make_constraints().grammars, [], dict.fromkeys(REFUSED, 0)
    for entry in SUITE:
        try:
            grammars.compile(shape_of(entry)).result()
            found.append(entry)
        except InvalidParams as error:
            reason = next((reason for reason, words in REFUSED.items() if re.search(words, str(error))), None)
            assert reason is not None, (entry["description"], str(error))
            refused[reason] += 1
    grammars.close()
    assert all(refused.values()), f"reasons that no schema has: {[name for name in refused if not refused[name]]}"
    return found


def test_most_schemas_compile_and_the_others_are_refused_for_known_reasons(compiled):
    assert len(SUITE) == 721 and len(compiled) >= 400


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("is_mixed", [False, True], ids=["plain", "drafts, samples and preemption"])
def test_every_output_that_ends_is_valid(compiled, depth, is_mixed, monkeypatch):
    monkeypatch.setattr(scripted, "draw", lazy)
    core = scripted_core(
        depth, max_num_seqs=16, max_model_len=96, num_pages=300, max_waiting=10**4, constraints=make_constraints(16)
    )
    if is_mixed:
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
                if is_valid(entry, json.loads(text)):
                    num_valid += 1
                else:
                    wrong.append((entry["file"], entry["description"], entry["schema"], text))
            else:
                assert output.finish_reason in (None, FinishReason.LENGTH), output
    core.close()
    assert [each for each in wrong if not any(name in json.dumps(each[2]) for name in NOT_ENFORCED)] == []
    assert num_valid >= 300 * (1 + is_mixed)
    if is_mixed:
        assert device.num_accepted > 100 and device.num_rejected > 100 and core.scheduler.num_preemptions > 40


def is_valid(entry, instance):
    draft = {"4": "Draft4", "6": "Draft6", "7": "Draft7"}.get(entry["draft"], "Draft202012")
    validator = getattr(jsonschema_rs, f"{draft}Validator")(entry["schema"], validate_formats=True)
    return validator.is_valid(instance)
