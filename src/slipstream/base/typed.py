"""Checks JSON values against msgspec types: an error says the place, what is there and what is taken.

msgspec decodes. What it refuses is walked along the type here: for an error in our words, and because some types take
more than they say, as an object without its tag (`untagged`) or, in an `InnerFields`, null under any name.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, get_args, get_type_hints

import msgspec

_SHOWN = 100  # characters of a value or a name in an error


class Mismatch(Exception):
    """A value does not fit its type. `path`: of the field, such as messages[0].content; empty for the whole value."""

    def __init__(self, message: str, path: str, code: str | None = None) -> None:
        super().__init__(message)
        self.path = path
        self.code = code


class Fields(msgspec.Struct, forbid_unknown_fields=True):
    """An object of a request. Fields of a type from `unsupported` have no value but those that ask for nothing."""

    takes_null: ClassVar[bool] = False  # under any name

    def __post_init__(self) -> None:
        for name, neutral in unsupported_fields(type(self)).items():
            if getattr(self, name) not in neutral:
                raise ValueError(f"{name} is not supported")  # `check` words the error


class InnerFields(Fields):
    """An object inside of another: clients send null where a field does not apply."""

    takes_null: ClassVar[bool] = True


def doc(text: str) -> msgspec.Meta:
    """For the text of a field in /docs."""
    return msgspec.Meta(description=text)


def unsupported(hint: str, *neutral: Any) -> msgspec.Meta:
    """For `Annotated[Any, unsupported(...)]`: a field that is not supported. `neutral`: values that ask for nothing."""
    return msgspec.Meta(
        description=f"not supported: {hint}", extra={"unsupported": hint, "neutral": (None, msgspec.UNSET, *neutral)}
    )


def untagged(tag: str) -> msgspec.Meta:
    """For a union of tagged structs: an object without a tag is one of these."""
    return msgspec.Meta(extra={"untagged": tag})


def wanted(text: str, **limits: Any) -> msgspec.Meta:
    """For limits of a value, and how an error states them."""
    return msgspec.Meta(**limits, extra={"wanted": text})


def convert(kind: Any, value: Any, path: str) -> Any:
    """The value as `kind`. Raises Mismatch. For values that mostly fit, or were converted before."""
    try:
        return msgspec.convert({"value": value}, _holder(kind)).value
    except msgspec.ValidationError:
        return check(kind, value, path)


@cache
def _holder(kind: Any) -> Any:
    """A struct with a value of this type: msgspec keeps what it knows of a struct, and takes 20 us to learn a union."""
    return msgspec.defstruct("Holder", [("value", kind)])


def check(kind: Any, value: Any, path: str = "") -> Any:
    """The value as `kind`, where msgspec has refused it. Raises Mismatch."""
    fitted = _checker(kind).fit(value, path)
    try:
        return msgspec.convert(fitted, kind)
    except msgspec.ValidationError as error:  # by a limit that the walk does not know
        raise Mismatch(f"{path or 'the body'}: {error}", path) from None


@cache
def unsupported_fields(kind: type[Fields]) -> dict[str, tuple[Any, ...]]:
    """The names of fields that are not supported, and the values that ask for nothing."""
    found = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for each in get_args(hint):
            if isinstance(each, msgspec.Meta) and each.extra is not None and "neutral" in each.extra:
                found[name] = each.extra["neutral"]
    return found


@cache
def _checker(kind: Any) -> _Checker:
    from msgspec import inspect  # takes 5 ms, at the first value that does not fit

    return _Checker(inspect.type_info(kind))


# JSON types in Python, by the types of msgspec.inspect, and their words
_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "NoneType": ((type(None),), ""), "BoolType": ((bool,), "true or false"), "IntType": ((int,), "a whole number"),
    "FloatType": ((int, float), "a number"), "StrType": ((str,), "a string"),
}  # fmt: skip


class _Checker:
    """Checks values of one type, or of the members of a union."""

    def __init__(self, kind: Any) -> None:
        self.notes: dict[str, Any] = {}
        self.plain: set[type] = set()  # values of these types are taken without a further check
        self.choices: list[Any] = []
        self.limited: list[Any] = []
        self.takes_all = False
        self.items: _Checker | None = None
        self.values: _Checker | None = None
        self.objects: list[_Object] = []
        self.words: list[str] = []
        self._add(kind)

    def _add(self, kind: Any) -> None:
        name = type(kind).__name__
        if name == "Metadata":
            self.notes |= kind.extra or {}
            self._add(kind.type)
        elif name == "UnionType":
            for each in kind.types:
                self._add(each)
        elif name == "StructType":
            self.objects.append(_Object(kind))
        elif name == "LiteralType":
            self.choices += kind.values
            self.words.append(f"{'one of ' * (len(kind.values) > 1)}{', '.join(map(str, kind.values))}")
        elif name == "ListType":
            most = sys.maxsize - 1 if kind.max_length is None else kind.max_length
            self.items, self.sizes = _Checker(kind.item_type), range(kind.min_length or 0, most + 1)
            inner = _either(list(map(_plural, self.items.phrases())))
            ending = " that is not empty" * (0 not in self.sizes)
            self.words += [f"a list{f' of {inner}' if inner else ''}{ending}"] if most else []
        elif name == "DictType":
            self.values = _Checker(kind.value_type)
            self.words.append("an object")
        elif name in _PLAIN:
            types, words = _PLAIN[name]
            self.words += [words] if words else []
            if getattr(kind, "pattern", None) is None and getattr(kind, "ge", None) is None:
                self.plain |= set(types)
            else:
                self.limited.append(kind)
        else:
            self.takes_all = True

    def fit(self, value: Any, path: str) -> Any:
        """The value without what is taken and means nothing."""
        if self.takes_all or type(value) in self.plain or (isinstance(value, str | int) and value in self.choices):
            return value
        if any(_is_within(value, each) for each in self.limited):
            return value
        if isinstance(value, list | tuple) and self.items is not None and len(value) in self.sizes:
            items, plain = self.items, self.items.plain  # the latter without a call: a list of token ids may be long
            return [
                each if type(each) in plain else items.fit(each, f"{path}[{index}]") for index, each in enumerate(value)
            ]
        if isinstance(value, Mapping) and self.objects:
            return self._object(value, path).fit(value, path)
        if isinstance(value, Mapping) and self.values is not None:
            return {name: self.values.fit(each, f"{path}.{str(name)[:_SHOWN]}") for name, each in value.items()}
        raise Mismatch(f"{path or 'the body'} is {_shown(value)}; give {self.described()}", path)

    def phrases(self) -> list[str]:
        """The types of values, in words."""
        if "wanted" in self.notes:
            return [self.notes["wanted"]]
        tags = [each.tag for each in self.objects if each.tag is not None]
        of_type = f" of {self.objects[0].tag_field} {_either(tags)}" if tags else ""
        return list(dict.fromkeys([*self.words, *(["an object" + of_type] if self.objects else ())]))

    def described(self) -> str:
        return _either(self.phrases()) or "it"

    def _object(self, value: Mapping[str, Any], path: str) -> _Object:
        """The struct that an object is of, by its tag."""
        first = self.objects[0]
        if first.tag_field is None:
            return first
        tag = value.get(first.tag_field, first.tag if len(self.objects) == 1 else self.notes.get("untagged"))
        for each in self.objects:
            if each.tag == tag:
                return each
        known = self.notes.get("wanted") or ", ".join(each.tag for each in self.objects)
        tag_path = _joined(path, first.tag_field)
        if first.tag_field not in value:
            raise Mismatch(f"{tag_path} is missing; give {known}", tag_path)
        if first.tag_field != "type" or not isinstance(tag, str):
            raise Mismatch(f"{tag_path} is {_shown(tag)}; give {known}", tag_path)
        fact = f"{path or 'the body'} is of type {_shown(tag)}, which is not supported here"
        raise Mismatch(f"{fact}; give {known}", tag_path, "unsupported_content")


class _Object:
    """Checks objects of one struct."""

    def __init__(self, kind: Any) -> None:
        self.tag: Any = kind.tag
        self.tag_field: str | None = kind.tag_field
        self.takes_null: bool = getattr(kind.cls, "takes_null", False)
        self.fields = {field.encode_name: _Checker(field.type) for field in kind.fields}
        self.required = [field.encode_name for field in kind.fields if field.required]

    def fit(self, given: Mapping[str, Any], path: str) -> dict[str, Any]:
        fitted = {} if self.tag_field is None else {self.tag_field: self.tag}
        for name, value in given.items():
            if name == self.tag_field or (value is None and name not in self.fields and self.takes_null):
                continue
            inner = _joined(path, str(name)[:_SHOWN])
            if (field := self.fields.get(name)) is None:
                raise self._unknown(inner, name, given, path)
            if "unsupported" in field.notes and value not in field.notes["neutral"]:
                fact = f"{inner} is not supported: {field.notes['unsupported']}"
                raise Mismatch(fact, inner, "unsupported_parameter")
            fitted[name] = field.fit(value, inner)
        self._check_missing(fitted, path)
        return fitted

    def _unknown(self, inner: str, name: Any, given: Mapping[str, Any], path: str) -> Mismatch:
        near = difflib.get_close_matches(str(name)[:_SHOWN], self.fields, n=1, cutoff=0.75)
        if not near:
            self._check_missing(given, path)  # rather this: the unknown field may be meant
        return Mismatch(f"there is no field {inner}; {f'did you mean {near[0]}?' if near else 'remove it'}", inner)

    def _check_missing(self, given: Mapping[str, Any], path: str) -> None:
        for name in self.required:
            if name not in given:
                inner = _joined(path, name)
                raise Mismatch(f"{inner} is missing; give {self.fields[name].described()}", inner)


def _is_within(value: Any, kind: Any) -> bool:
    """Whether a value is within the limits of a type of strings or whole numbers."""
    if isinstance(value, str):
        return type(kind).__name__ == "StrType" and re.search(kind.pattern, value) is not None
    return type(value) is int and type(kind).__name__ == "IntType" and value >= kind.ge


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def _plural(words: str) -> str:
    """a string -> strings; an object of type text -> objects of type text; one of a, b -> a, b."""
    return re.sub(r"^an? (.*?(?:string|number|object|list))\b", r"\1s", words.removeprefix("one of "))


def _shown(value: Any) -> str:
    """A value in an error."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | list | tuple):
        return "an object" if isinstance(value, Mapping) else "a list"
    if isinstance(value, int) and value.bit_length() > 2 * _SHOWN:
        return "a very large number"
    return repr(value[:_SHOWN] if isinstance(value, str) else value)[: _SHOWN + 2]
