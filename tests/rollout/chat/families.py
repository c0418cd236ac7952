"""Small tokenizers that imitate real model families, with their chat templates. The
tokenizers have each family's control tokens. The templates are minimal and written for these tests.
They contain the family's marks, separators and rules for turns, tools and thinking, but none of its
instructions to the model."""

from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import ToolSpec
from keel.rollout.chat.chat import TemplateChat

CITY = ToolSpec(
    name="city",
    description="Looks a city up.",
    parameters={
        "type": "object",
        "properties": {"name": {"type": "string"}, "days": {"type": "integer"}},
    },
)

LINES = [
    'The result is {"name": "city", "arguments": {"name": "Hangzhou"}}\n',
    "A hotel of 3 nights costs 800 yuan.\n\nIs it (really) that much?\n",
    "<tool_response>\n{}\n</tool_response>\n assistant user system tool\n",
    "think </tool_call> arg_key arg_value im_start im_end function_results invoke\n",
]
_SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

QWEN3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' and not m.content.startswith('<tool_response>') -%}
{%- set ns.last = messages.index(m) -%}{%- endfor -%}
{%- if tools -%}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}# Tools
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + m.content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' -%}
  {%- set thought = m.reasoning_content if m.reasoning_content is string else '' -%}
  {{- '<|im_start|>assistant\n' -}}
  {%- if loop.index0 > ns.last and (loop.last or thought) -%}
    {{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + m.content.lstrip('\n') -}}
  {%- else -%}{{- m.content -}}{%- endif -%}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n' if (loop.first and m.content) or not loop.first else '' -}}
    {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' -}}
    {{- call.function.arguments | tojson }}{{- '}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
  {{- '<|im_start|>user' if loop.first or messages[loop.index0 - 1].role != 'tool' else '' -}}
  {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
  {{- '<|im_end|>\n' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking -%}
  {{- '<think>\n\n</think>\n\n' -}}
{%- endif -%}
{%- endif -%}
"""

HERMES = """\
{{- bos_token -}}
{%- if tools -%}{{ '<|im_start|>system\n<tools>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '</tools> in <tool_call><|im_end|>\n' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
  {{- '<|im_start|>tool' if messages[loop.index0 - 1].role != 'tool' else '' -}}
  {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
  {{- '<|im_end|>' if loop.last or messages[loop.index0 + 1].role != 'tool' else '' -}}
{%- else -%}
  {{- '<|im_start|>' + m.role + '\n' + m.content -}}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n<tool_call>\n{"arguments": ' + call.function.arguments | tojson -}}
    {{- ', "name": "' + call.function.name + '"}\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""

GLM45 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor -%}
{{- '[gMASK]<sop>' -}}
{%- if tools -%}{{ '<|system|>\n# Tools' }}
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}
  {{- '<|user|>\n' + m.content -}}
  {{- '/nothink' if enable_thinking is defined and not enable_thinking else '' -}}
{%- elif m.role == 'system' -%}{{ '<|system|>\n' + m.content }}
{%- elif m.role == 'assistant' -%}
  {%- set thought = m.reasoning_content if m.reasoning_content and loop.index0 > ns.last else '' -%}
  {{- '<|assistant|>\n<think>' + thought.strip() + '</think>' -}}
  {{- '\n' + m.content.strip() if m.content.strip() else '' -}}
  {%- for call in m.tool_calls or [] -%}
    {{- '\n<tool_call>' + call.function.name -}}
    {%- for key, value in call.function.arguments.items() -%}
      {{- '\n<arg_key>' + key + '</arg_key>\n<arg_value>' -}}
      {{- value if value is string else value | tojson }}{{- '</arg_value>' -}}
    {%- endfor -%}
    {{- '\n</tool_call>' -}}
  {%- endfor -%}
{%- elif m.role == 'tool' -%}
  {{- '<|observation|>' if messages[loop.index0 - 1].role != 'tool' else '' -}}
  {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{{- '\n<think></think>' if enable_thinking is defined and not enable_thinking else '' -}}
{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token -}}
{%- for m in messages -%}
{%- if m.role in ('system', 'user') -%}
  {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' -}}
  {%- for tool in (tools or []) if m == messages[0] -%}{{ (tool | tojson) + '\n\n' }}{%- endfor -%}
  {{- m.content | trim + '<|eot_id|>' -}}
{%- elif m.role == 'tool' -%}
  {{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (m.content | tojson) + '<|eot_id|>' -}}
{%- else -%}
  {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call a turn') }}{%- endif -%}
    {%- set function = m.tool_calls[0].function -%}
    {{- '{"name": "' + function.name + '", "parameters": ' + function.arguments | tojson + '}' -}}
  {%- else -%}{{- m.content | trim -}}{%- endif -%}
  {{- '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""

GPT_OSS = """\
{%- set ns = namespace(last=-1, called='') -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = messages.index(m) %}{% endfor -%}
{{- '<|start|>system<|message|>Reasoning: medium<|end|>' -}}
{%- if tools or messages[0].role == 'system' -%}
{{- '<|start|>developer<|message|>' -}}
{{- messages[0].content if messages[0].role == 'system' else '' -}}
{%- for tool in tools or [] -%}
  {{- '\ntype ' + tool.function.name + ' = (_: {' -}}
  {%- for key in tool.function.parameters.properties -%}{{ key + ', ' }}{%- endfor -%}{{ '})' }}
{%- endfor -%}{{ '<|end|>' }}
{%- endif -%}
{%- for m in messages -%}
{%- if m.role == 'user' -%}{{ '<|start|>user<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'assistant' -%}
  {%- if m.reasoning_content and loop.index0 > ns.last -%}
    {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.reasoning_content + '<|end|>' -}}
  {%- endif -%}
  {%- if m.tool_calls -%}
    {%- if m.tool_calls | length != 1 -%}{{ raise_exception('one call a turn') }}{%- endif -%}
    {%- set function = m.tool_calls[0].function -%}{%- set ns.called = function.name -%}
    {{- '<|start|>assistant to=functions.' + function.name -}}
    {{- '<|channel|>commentary json<|message|>' + function.arguments | tojson + '<|call|>' -}}
  {%- else -%}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content -}}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' -}}
  {%- endif -%}
{%- elif m.role == 'tool' -%}
  {{- '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' -}}
  {{- m.content | tojson + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""

CHATML = """\
{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

SEED = """\
{%- for m in messages -%}
{{- '<seed:bos>' + m.role + '\\n' -}}
{%- if m.reasoning_content -%}
  {{- '<seed:think>' + m.reasoning_content | trim + '</seed:think>\\n' -}}
{%- endif -%}
{{- m.content | trim + '<seed:eos>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<seed:bos>assistant\\n' }}{%- endif -%}
"""

_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_GLM = (
    *("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>"),
    "<|observation|>",
)
_LLAMA = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>", "<|python_tag|>"),
)
_HARMONY = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    *("<|return|>", "<|endoftext|>"),
)
_ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_SEED = ("<seed:bos>", "<seed:eos>", "<seed:think>", "</seed:think>")
# Name: template, special tokens, added tokens that are not special, end of the turn, begin of text.
FAMILIES: dict[str, tuple[str | None, tuple[str, ...], tuple[str, ...], str, str | None]] = {
    "qwen3": (QWEN3, _CHATML, _TAGS + _THINK, "<|im_end|>", None),
    "hermes": (HERMES, (*_CHATML, "<|begin_of_text|>"), (), "<|im_end|>", "<|begin_of_text|>"),
    "deepseek-v3.2": (None, _DEEPSEEK, (*_THINK, "｜DSML｜"), _DEEPSEEK[1], _DEEPSEEK[0]),
    "glm": (GLM45, _GLM, _THINK + _TAGS + _ARGUMENTS, "<|endoftext|>", None),
    "llama3": (LLAMA3, _LLAMA, (), "<|eot_id|>", "<|begin_of_text|>"),
    "harmony": (GPT_OSS, _HARMONY, (), "<|return|>", None),
}
NAMES = ("tiny", *FAMILIES)
FAMILIES |= {
    "chatml": (CHATML, _CHATML, (), "<|im_end|>", None),
    "seed": (SEED, _SEED, (), "<seed:eos>", None),
}
PLAIN = ("chatml", "seed")
"""Families whose tool call format Keel cannot parse."""
WITHOUT_THINKING = ("hermes", "llama3")
"""Families whose templates do not support `reasoning_content`."""


@cache
def tokenizer_of(name: str) -> Any:
    if name == "tiny":
        return build_tokenizer()
    template, special, added, end, begin = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator(LINES * 4, trainer)
    backend.add_special_tokens(list(special))
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=end,
        **({"bos_token": begin} if begin else {}),
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


@cache
def chat_of(name: str, *, tools_in_thinking: bool = False) -> TemplateChat:
    return TemplateChat(tokenizer_of(name), tools_in_thinking=tools_in_thinking)
