"""The memory of chat templates is limited, however they use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from slipstream.base.errors import InvalidPrompt
from slipstream.text.chat_template import render_chat

HI = [{"role": "user", "content": "Hi"}]


def render(template: str, messages: Sequence[Mapping[str, Any]] = HI) -> str:
    return render_chat(template, messages)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 10 ** 9 }}",
        "{{ ('a'.encode() * 10 ** 9) | length }}",
        "{{ (9 ** (9 ** 9)) | length }}",
        "{% set ns = namespace(x=9) %}{% for i in range(40) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        "{{ 'x'.center(10 ** 9) }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ ('x' | attr('zfill'))(10 ** 9) }}",
        "{{ (['x'] | map('center', 10 ** 9) | list) }}",
        "{{ '\t'.expandtabs(tabsize=10 ** 9) }}",
        "{{ (1).to_bytes(length=10 ** 9, byteorder='big') | length }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%.*f' % (10 ** 9, 1.0) }}",
        "{{ '%1000000000s' | format(1) }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, '1000000000') }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ 'x' | indent(10 ** 9, first=True) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ messages | tojson(separators=('x' * 10 ** 7, ':')) }}",
        "{{ [1] | batch(10 ** 9, 0) | list }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
        "{{ ('x' * 10 ** 5) | replace('x', 'y' * 10 ** 5) }}",
        "{{ ('x' * 10 ** 5).replace('', 'y' * 10 ** 5) }}",
        "{{ ('x' * 10 ** 5).translate({120: 'y' * 10 ** 5}) }}",
        "{{ ('y' * 10 ** 5).join('x' * 10 ** 5) }}",
        "{{ ('x' * 10 ** 5) | join('y' * 10 ** 5) }}",
        "{{ ('x' * 10 ** 5) | wordwrap(1, wrapstring='y' * 10 ** 5) }}",
        "{{ range(99999) | join('y' * 10 ** 5) }}",
        "{{ (['x' * 10 ** 6] * 10 ** 3) | join }}",
        "{{ ([range(99999)] * 99999) | map('list') | list | length }}",
        "{{ ([[1] * 99999] * 99999) | sum(start=[]) | length }}",
        "{{ ('aa ' * 10 ** 7).split() | length }}",
        "{{ ('aa ' * 10 ** 7).split(' ') | length }}",
        "{{ ('aa\u2028' * 10 ** 7).splitlines() | length }}",
        "{{ ('\u65e5' * 10 ** 6) | list | length }}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[0]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = t %}{% endfor %}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns }}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}"
        "{{ ns.x.items() ~ '' }}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}",
        "{% set ns = namespace(x='x') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ '%s' % ns.x }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + ['x' * 10 ** 5 ~ i] %}"
        "{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = ns.x + [[0, 1, 2, 3, 4] * 9999] %}"
        "{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% set t = 'x' * 10 ** 6 %}{% for i in range(9999) %}"
        "{% set ns.x = ns.x + [t[1:]] %}{% endfor %}",
        "{% set t = 'x' * 10 ** 6 %}{% for i in range(9999) %}{{ t }}{% endfor %}",
        "{% for i in range(9999) %}" + "x" * 10**5 + "{% endfor %}",
        "{% macro f() %}{% for i in range(9999) %}{{ 'x' * 10 ** 5 }}{% endfor %}{% endmacro %}{{ f() | length }}",
    ],
)
def test_a_template_that_would_fill_the_memory_is_refused(template: str) -> None:
    with pytest.raises(InvalidPrompt, match=r"would need more than 16,7\d\d,\d\d\d bytes.*chat_template="):
        render(template)


def test_values_that_are_dropped_do_not_count_and_those_of_the_request_raise_the_limit() -> None:
    template = "{% set ns = namespace(x='') %}{% for i in range(400) %}{% set ns.x = 'x' * 10 ** 6 ~ i %}{% endfor %}"
    assert render(template + "{{ ns.x | length }}") == "1000003"
    text = "日" * 10**7
    template = "{% for m in messages %}{% set a = m.content + '.' %}{{ a ~ '!' }}{% endfor %}"
    assert render(template, [{"role": "user", "content": text}]) == text + ".!"
