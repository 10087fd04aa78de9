"""Chat templates that do what those of real models do, each in its own way."""

from __future__ import annotations

from tiny_tokenizer import CHATML

TRIMMED = """\
{%- set loop_messages = messages %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('no such role') }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n\\n' }}{% endif %}
"""

INST = """\
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = messages[0]['content'].strip() + '\\n\\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in rest -%}
    {%- set content = system ~ message.content if loop.first else message.content -%}
    {%- if message.role == 'user' -%}
        {{- '[INST] ' + content.strip() + ' [/INST]' -}}
    {%- else -%}
        {{- ' ' ~ content.strip() ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
"""

ROLE_IN_TOKEN = """\
{% for message in messages %}\
{{ '<|' + message['role'] + '|>' + '\\n' + message['content'] + eos_token + '\\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages[::-1] %}
    {%- if ns.last < 0 and message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last = messages | length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\\nTools:' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\\n<tool_call>\\n{"name": ...}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content or '' %}
        {%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {%- set function = call.function %}
            {{- '\\n<tool_call>\\n{"name": "' ~ function.name ~ '", "arguments": ' }}
            {%- set given = function.arguments %}
            {%- if given is string %}{{ given }}{% else %}{{ given | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""

NOT_SPECIAL_TURNS = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
        {{- content + '<|im_end|>' }}
    {%- else %}
        {{- '<｜Next｜>' + message.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Next｜>' }}{% endif %}
"""

MACROS = """\
{%- macro turn(role, content) -%}
<|im_start|>{{ role }}
{{ caller(content) if caller else content }}<|im_end|>
{% endmacro -%}
{%- macro xml(values) -%}
    {%- for key, value in values.items() %}
<{{ key }}>{{ value if value is string else value | tojson }}</{{ key }}>
    {%- endfor %}
{%- endmacro -%}
{%- for message in messages -%}
    {%- if message.tool_calls -%}
        {%- call(content) turn(message.role, message.content or '') -%}
            {{ content }}{% for call in message.tool_calls %}{{ xml(call.function.arguments) }}{% endfor %}
        {%- endcall -%}
    {%- else -%}
        {{ turn(message.role, message.content) }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ turn('assistant', '').split('<|im_end|>')[0] }}{% endif -%}
"""

PUT_TOGETHER = """\
{%- set texts = messages | map(attribute='content') | map('trim') | list -%}
{%- set line = '<|im_start|>{role}\\n{content}<|im_end|>' -%}
{%- set turns = [] -%}
{%- for message in messages -%}
    {{- line | replace('{role}', message.role) | replace('{content}', texts[loop.index0]) }}
    {%- set kept %}{{ message.content[:5] }}{% endset %}
    {{- '\\n' ~ [kept, '<|im_end|>'] | join('|') ~ '\\n' -}}
{%- endfor -%}
{{- '<|im_start|>' ~ (texts | join('\\n<|im_end|>\\n')) -}}
{%- filter upper %}{{ texts[-1] | lower }}{% endfilter -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""

FORMATTED = """\
{%- for message in messages -%}
    {{- '<|im_start|>%s\\n%s<|im_end|>\\n' % (message.role, message.content) -}}
    {{- '<|im_start|>{}\\n{}<|im_end|>\\n'.format(message.role, message.content | capitalize | indent(2)) -}}
{%- endfor -%}
"""

AS_JSON = """\
<|im_start|>{{ messages | tojson }}<|im_end|>{{ messages | tojson(indent=2) }}\
{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "trimmed": TRIMMED,
    "inst": INST,
    "role in token": ROLE_IN_TOKEN,
    "thinking": THINKING,
    "turns that are not special": NOT_SPECIAL_TURNS,
    "macros": MACROS,
    "put together": PUT_TOGETHER,
    "formatted": FORMATTED,
    "json": AS_JSON,
}
