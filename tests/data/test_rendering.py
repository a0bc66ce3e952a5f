"""Templates of others are rendered within limits, and as transformers renders them."""

import json
import tracemalloc

import pytest

from tests.data.test_template import QWEN25
from tests.errors import raises
from tests.memory import start_tracing
from tilth.data import rendering
from tilth.data.template import CHATML, TODAY, TemplateError, _renderer

pytest.importorskip("transformers")
MESSAGES = [{"role": "user", "content": "hello\nyou"}, {"role": "assistant", "content": "hm", "tool_calls": []}]
STEPS = "{%% set n = namespace(s=%s) %%}{%% for i in range(60) %%}%s{%% endfor %%}{{ n.s }}"
LARGE = "{% set s = 'a' * 50000 %}"
HUGE = {
    "loops": "{% for a in range(20000) %}{% for b in range(20000) %}{% endfor %}{% endfor %}",
    "loops of a filter": "{% for a in range(9999)|select %}{% for b in range(9999)|select %}{% endfor %}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "text": "{% for i in range(90000) %}" + "x" * 9000 + "{% endfor %}",
    "product": "{{ 'a' * 1000000000 }}",
    "list": "{% set s = [0] * 1000000000 %}",
    "power": "{{ 10 ** 1000000000 }}",
    "squares": STEPS % ("9", "{% set n.s = n.s * n.s %}"),
    "sums": STEPS % ("'aaaa'", "{% set n.s = n.s + n.s %}"),
    "pairs": STEPS % ("'aaaa'", "{% set n.s = n.s ~ n.s %}"),
    "blocks": STEPS % ("'aaaa'", "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}"),
    "nested lists": STEPS % ("[1]", "{% set n.s = [n.s, n.s] %}"),
    "nested objects": STEPS % ("[1]", "{% set n.s = dict(a=n.s, b=n.s) %}"),
    "replace": LARGE + "{{ s.replace('a', s) }}",
    "replace, a filter": LARGE + "{{ s|replace('a', s) }}",
    "join": LARGE + "{{ s.join(s) }}",
    "join, a filter": LARGE + "{{ range(99999)|map(attribute='x', default=s)|join }}",
    "width": "{{ '%1000000000d' % 1 }}",
    "width, a value": "{{ '%*d' % (1000000000, 1) }}",
    "width, a filter": "{{ '%1000000000d'|format(1) }}",
    "indent": "{{ ('a\n' * 9999)|indent(99999) }}",
    "tojson": "{{ [1, 2]|tojson(indent=1000000000) }}",
    "slices": LARGE + "{% for i in range(99999) %}{% set x = s[1:] %}{% endfor %}",
    "comparisons": "{% set s = [0] * 99999 %}{% for i in range(99999) %}{% if s == s[:] %}{% endif %}{% endfor %}",
    "sum": "{% set s = [0] * 99999 %}{% for i in range(99999) %}{{ s|sum }}{% endfor %}",
    "itself": "{% set n = namespace() %}{% set n.a = n %}{{ n }}",
}


@pytest.mark.parametrize("source", HUGE.values(), ids=HUGE)
def test_a_template_that_does_too_much_ends(monkeypatch, source):
    monkeypatch.setattr(rendering, "WORK", 1 << 14)
    start_tracing()
    try:
        with raises(TemplateError, "template.limits"):
            _renderer(source, {}, "theirs")(MESSAGES, True)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


MISSING = ["{{ lipsum(n=100000) }}", "{{ 'a'.center(1000000000) }}", "{{ '{:>1000000000}'.format(1) }}", "{{ 1 / 0 }}"]
MISSING += ["{{ (1).to_bytes(1000000000, 'big') }}", "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"]


@pytest.mark.parametrize("source", MISSING)
def test_what_a_template_may_not_do_is_an_error_by_name(source):
    with raises(TemplateError, "template.render"):
        _renderer(source, {}, "theirs")(MESSAGES, True)
    with raises(TemplateError, "template.syntax"):
        _renderer("{{ 'a'|center(1000000000) }}", {}, "theirs")


EVERY = """{%- macro spelled(x, deep=0) -%}
{%- if x is mapping -%}{%- for k, v in x.items() -%}{{ ' ' * deep }}{{ k }}: {{ spelled(v, deep + 1) }}{%- endfor -%}
{%- elif x is string -%}{{ x.strip()[1:-1] | upper }}{%- else -%}{{ x | tojson(indent=2) }}{%- endif -%}
{%- endmacro -%}
{%- set ns = namespace(last=-1, seen=[]) -%}
{%- for m in messages[::-1] if m.role in ('user', 'tool') -%}{%- set ns.seen = ns.seen + [m.content.split('l')] -%}
{{ loop.index }}/{{ loop.length }}/{{ loop.last }}{%- else -%}none{%- endfor -%}
{%- for t in tools or [] recursive -%}{{ spelled(t) }}{%- if loop.index > 1 -%}{%- break -%}{%- endif -%}{%- endfor -%}
{{ messages | map(attribute='role') | select('equalto', 'user') | list | length }}{{ '%s-%02d' % ('a', 3) }}
{{- ns.seen ~ 'x' ~ 1 }}{{ 'a,b'.replace(',', ';') | replace(';', '.') }}{{ ['a', 'b'] | join(', ') }}{{ 2 ** 3 % 5 }}
{%- set block %}{{ messages[0].content | trim }}{% endset %}{{ block }}{{ strftime_now('%Y') }}
{{- missing | default(9) }}{{ 'a\\nb' | indent(2) }}"""
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": ["a"], "n": 1.5}}}


@pytest.mark.parametrize("source", [EVERY, CHATML, QWEN25])
@pytest.mark.parametrize("tools", [[], [TOOL, TOOL]], ids=["alone", "tools"])
def test_a_text_is_that_of_transformers(source, tools):
    from transformers.utils.chat_template_utils import _compile_jinja_template

    wanted = _compile_jinja_template(source).render(
        messages=json.loads(json.dumps(MESSAGES)), tools=tools or None, add_generation_prompt=True,
        strftime_now=TODAY.strftime,
    )  # fmt: skip
    assert _renderer(source, {}, "theirs")(MESSAGES, True, tools) == wanted


def test_a_long_conversation_is_far_from_the_limits(monkeypatch):
    monkeypatch.setattr(rendering, "WORK", rendering.WORK >> 2)
    long = [{"role": "user", "content": "word " * 400}] * 4096
    assert len(_renderer(CHATML, {}, "chatml")(long, True)) > 4096 * 2000
