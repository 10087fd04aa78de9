"""Values that do not fit a type: the error names the place, what is there and what is taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
import pytest

from slipstream.base.typed import Fields, InnerFields, Mismatch, check, unsupported, untagged, wanted


class Text(InnerFields, tag="text"):
    text: str
    notes: Annotated[Any, unsupported("answers have none", [], "off")] = None


class Link(InnerFields, tag="link"):
    url: Annotated[str, wanted("an address that begins with http", pattern="^http")]
    size: Literal["small", "large"] | None = None


Part = Annotated[Text | Link, untagged("text")]


class Inner(Fields):
    name: str


class Body(Fields, kw_only=True):
    mode: Literal["fast", "slow"] | int | None = None
    parts: str | list[str | Part] | None = None
    one: Text | None = None
    inner: Inner | None = None
    weights: dict[str, float] | None = None
    ids: list[int | list[int]] | None = None
    some: Annotated[list[str], msgspec.Meta(min_length=1)] | None = None
    tier: Annotated[Any, unsupported("there is one tier", "auto", False)] = None


WRONG = [
    ([], "", "the body is a list; give an object"),
    ({"x": 1}, "x", "there is no field x; remove it"),
    ({"x": None}, "x", "there is no field x; remove it"),
    ({"mode": "quick"}, "mode", "mode is 'quick'; give one of fast, slow or a whole number"),
    ({"mode": True}, "mode", "mode is true; give one of fast, slow or a whole number"),
    ({"parts": 5}, "parts", "parts is 5; give a string or a list of strings or objects of type text or link"),
    ({"parts": ["a", None]}, "parts[1]", "parts[1] is null; give a string or an object of type text or link"),
    ({"parts": [{"text": 5}]}, "parts[0].text", "parts[0].text is 5; give a string"),
    ({"parts": [{"type": "text"}]}, "parts[0].text", "parts[0].text is missing; give a string"),
    ({"parts": [{"type": "film", "text": "a"}]}, "parts[0].type",
     "parts[0] is of type 'film', which is not supported here; give text, link"),
    ({"parts": [{"type": None, "text": "a"}]}, "parts[0].type", "parts[0].type is null; give text, link"),
    ({"parts": [{"type": "link", "url": "ftp"}]}, "parts[0].url",
     "parts[0].url is 'ftp'; give an address that begins with http"),
    ({"parts": [{"type": "link", "url": "http", "size": []}]}, "parts[0].size",
     "parts[0].size is a list; give one of large, small"),
    ({"parts": [{"text": "a", "txt": 1}]}, "parts[0].txt", "there is no field parts[0].txt; did you mean text?"),
    ({"parts": [{"txt": "a"}]}, "parts[0].txt", "there is no field parts[0].txt; did you mean text?"),
    ({"parts": [{"content": "a"}]}, "parts[0].text", "parts[0].text is missing; give a string"),
    ({"one": {"type": None, "text": "a"}}, "one.type", "one.type is null; give text"),
    ({"one": {"text": "a", "notes": [1]}}, "one.notes", "one.notes is not supported: answers have none"),
    ({"one": {"type": "link", "url": "http"}}, "one.type",
     "one is of type 'link', which is not supported here; give text"),
    ({"inner": {"name": "a", "x": None}}, "inner.x", "there is no field inner.x; remove it"),
    ({"inner": {"name": "a", "": None}}, "inner.", "there is no field inner.; remove it"),
    ({"weights": {"a": 1, "b": "2"}}, "weights.b", "weights.b is '2'; give a number"),
    ({"ids": [1, [2, "3"]]}, "ids[1][1]", "ids[1][1] is '3'; give a whole number"),
    ({"some": []}, "some", "some is a list; give a list of strings that is not empty"),
    ({"tier": "gold"}, "tier", "tier is not supported: there is one tier"),
]  # fmt: skip


@pytest.mark.parametrize(("value", "path", "text"), WRONG, ids=str)
def test_what_does_not_fit_is_named(value, path, text):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, Body)
    with pytest.raises(Mismatch) as error:
        check(Body, value)
    assert (error.value.path, str(error.value)) == (path, text)
    assert (error.value.code is not None) == ("not supported" in text)


TAKEN = [
    ({"parts": [{"text": "a"}]}, Body(parts=[Text("a")])),
    ({"parts": [{"type": "link", "url": "http", "extra": None}, "b"]}, Body(parts=[Link("http"), "b"])),
    ({"one": {"text": "a", "notes": [], "extra": None}}, Body(one=Text("a", []))),
    ({"tier": "auto", "mode": 3, "weights": {"a": 1}}, Body(tier="auto", mode=3, weights={"a": 1.0})),
]


@pytest.mark.parametrize(("value", "taken"), TAKEN, ids=str)
def test_what_asks_for_nothing_is_taken(value, taken):
    assert check(Body, value) == taken


def test_what_was_read_before_is_taken():
    assert msgspec.convert([Text("a"), "b"], list[str | Part]) == [Text("a"), "b"]


def test_values_in_an_error_are_short():
    for value in ("x" * 10**6, 10**5000, {"x" * 10**6: 1}, ["x"] * 10**6):
        with pytest.raises(Mismatch) as error:
            check(Body, value if isinstance(value, dict) else {"inner": value})
        assert len(str(error.value)) < 300 and len(error.value.path) < 200


def test_a_wrong_value_in_a_long_list_is_found_without_a_walk(monkeypatch):
    from slipstream.base import typed

    calls = []
    fit = typed._Checker.fit
    monkeypatch.setattr(typed._Checker, "fit", lambda *given: calls.append(given) or fit(*given))
    with pytest.raises(Mismatch, match=r"ids\[100000\] is '1'"):
        check(Body, {"ids": [1] * 100_000 + ["1"]})
    assert len(calls) < 10
