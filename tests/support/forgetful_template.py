"""A chat template that leaves out the reasoning of turns before the newest question, as Qwen3's does."""

FORGETFUL = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t.function.name }}{% endfor %}: "
    '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\n{% endif %}'
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KEEPS_NEWEST = FORGETFUL.replace("loop.index0 < ns.last", "loop.index0 < messages | length - 2")
"""Template that leaves out the reasoning of all turns but the newest."""
OPEN, END = "<|im_start|>", "<|im_end|>"
