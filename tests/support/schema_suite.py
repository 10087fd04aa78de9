"""JSON schemas of the public test suite, drafts 4, 6, 7 and 2020-12 (tests/data/json_schema_suite.json): which of them
compile, and which texts are valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs

from slipstream.base.errors import InvalidParams
from slipstream.params.structured import StructuredOutputsParams
from slipstream.scheduler.grammar.grammars import Grammars

SUITE = json.loads((Path(__file__).parents[1] / "data" / "json_schema_suite.json").read_text())
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


def shape_of(entry: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=entry["schema"], disable_any_whitespace=True)


def compiled_schemas(grammars: Grammars) -> list[dict[str, Any]]:
    """The schemas that compile. The others are refused, each for a listed reason."""
    found, refused = [], dict.fromkeys(REFUSED, 0)
    for entry in SUITE:
        try:
            grammars.compile(shape_of(entry)).result()
            found.append(entry)
        except InvalidParams as error:
            reason = next((reason for reason, words in REFUSED.items() if re.search(words, str(error))), None)
            assert reason is not None, (entry["description"], str(error))
            refused[reason] += 1
    assert all(refused.values()), f"reasons that no schema has: {[name for name in refused if not refused[name]]}"
    return found


def breaks_schema(entry: dict[str, Any], text: str) -> bool:
    """Whether a text is not valid, although all keywords of its schema are enforced."""
    if any(name in json.dumps(entry["schema"]) for name in NOT_ENFORCED):
        return False
    return not is_valid(entry, json.loads(text))


def is_valid(entry: dict[str, Any], instance: Any) -> bool:
    draft = {"4": "Draft4", "6": "Draft6", "7": "Draft7"}.get(entry["draft"], "Draft202012")
    validator = getattr(jsonschema_rs, f"{draft}Validator")(entry["schema"], validate_formats=True)
    return bool(validator.is_valid(instance))
