"""The tiny model's tokenizer. Its vocabulary is all bytes, a few phrases and the special tokens for
chats, and it needs no download.

Every byte is a token, so any text can be encoded exactly. Digits and letters are separate tokens,
which arithmetic and spelling need. Each fixed sentence in a taught task is a single token, so a
prompt has about 20 tokens instead of hundreds.
"""

import re
from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_END_OF_TEXT = "<|endoftext|>"
_TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
THINK_START = "<think>"
THINK_END = "</think>"

MARKS = (_END_OF_TEXT, _TURN_START, TURN_END, THINK_START, THINK_END)
"""The tokens with ids 0–4. Thinking tags are not special tokens, so decoding always keeps them."""

_PHRASES = (
    "State the final answer to the following arithmetic problem: ",
    "Calculate ",
    "Spell this word backward (example: sun -> nus): ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Given a matrix, your job is to generate a list of elements in spiral order, starting from the "
    "top-left element.\n\nThe spiral order is clockwise, starting from the top-left corner. More "
    "precisely:\n- Start from the top-left corner and move right along the top row.\n"
    "- Move down along the right column.\n- Move left along the bottom row.\n"
    "- Move up along the left column.\n- Repeat the steps for the inner elements of the matrix "
    "until every entry is visited.\n\nHint: Think of peeling the matrix layer by layer from the "
    "outside inward. Each layer forms a rectangular frame, and you traverse each frame clockwise "
    "starting from its top-left corner.\n\nYour output should be a space-separated list of "
    "integers, e.g. 1 2 3 4 5 6\n\nFor the matrix below, what is the list of elements in spiral "
    "order?\n",
    "system\n",
    "user\n",
    "assistant\n",
    "\n\n",
    " + ",
    " - ",
    " =",
    ", ",
    # Tasks with tools: the list of tools, its tools' names, and the fixed words of the tasks.
    "Tools:\n@get_all_hotels_by_city city: All hotels of a city.\n@submit_result answer_text: "
    "Submit the finished plan. This ends the task.",
    "@get_all_hotels_by_city",
    "@submit_result",
    "Find a hotel in ",
    " for at most ",
    " CNY. Submit the hotel.",
    "tool\n",
    "Tools:\n@play action: Make a move. The result is what can be seen after it.",
    "@play",
    "Guess a number from ",
)
"""Strings that are encoded as a single token. They must be ASCII and must not occur inside a word
or number (`lower` would break the spelling of `flower`). Append new strings at the end, so that ids
do not change. Adding more than three would enlarge the embedding and change all random weights."""

_VOCAB_MULTIPLE = 32

CHAT_TEMPLATE = """\
{%- set ns = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set ns.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools -%}
  {{- '<|im_start|>system\\n' -}}
  {%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
  {{- 'Tools:' -}}
  {%- for tool in tools -%}
    {%- set function = tool.function or tool -%}
    {{- '\\n@' + function.name -}}
    {%- for name in (function.parameters or {}).properties or {} -%}
      {{- (' ' if loop.first else ', ') + name -}}
    {%- endfor -%}
    {{- ': ' + (function.description or '') -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
  {%- set content = message.content if message.content is string else '' -%}
  {%- if message.role == 'assistant' -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > ns.last_user and message.reasoning_content is string -%}
      {{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- elif tools and enable_thinking is defined and not enable_thinking -%}
      {{- '<think>\\n\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- content -}}
    {%- for call in message.tool_calls or [] -%}
      {%- set function = call.function or call -%}
      {{- ('\\n' if content or not loop.first else '') + '@' + function.name -}}
      {%- set given = function.arguments -%}
      {%- set order = namespace(names=given.keys() | list, last=-1) -%}
      {%- for tool in tools or [] if (tool.function or tool).name == function.name -%}
        {%- set order.names = (tool.function or tool).parameters.properties.keys() | list -%}
      {%- endfor -%}
      {%- for name in order.names if name in given -%}
        {%- set order.last = order.names.index(name) -%}
      {%- endfor -%}
      {%- for name in order.names[:order.last + 1] -%}
        {{- (' ' if loop.first else ', ') + (given[name] | tojson if name in given else 'null') -}}
      {%- endfor -%}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
  {%- elif not (tools and loop.first and message.role == 'system') -%}
    {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and not enable_thinking -%}
    {{- '<think>\\n\\n</think>\\n\\n' -}}
  {%- endif -%}
{%- endif -%}
"""
"""Follows Qwen3's conventions: thinking is kept only after the last user message, and
`enable_thinking=False` adds an empty thinking block. Tools are formatted briefly, because each
letter is a token. `@name argument, argument: description` lists a tool, and a call is a line `@name
1, "two"` with the arguments as JSON in that order."""


def build_tokenizer(more: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Build the tokenizer, with the ASCII strings in model.tiny.phrases as extra tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    texts = tuple(dict.fromkeys((*_PHRASES, *more)))
    phrases = ["".join(piece for piece, _ in to_bytes.pre_tokenize_str(text)) for text in texts]
    # A phrase may already be a token: a byte or a mark.
    tokens = dict.fromkeys((*MARKS, *alphabet, *phrases))
    vocab = {token: index for index, token in enumerate(tokens)}

    # No merges: a piece is a phrase in the vocabulary, or is split into its bytes.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    longest_first = sorted(texts, key=len, reverse=True)
    pieces = Regex("|".join(re.escape(text) for text in longest_first) + r"|[\s\S]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pieces, behavior="isolated"), to_bytes]
    )
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=_END_OF_TEXT,
        eos_token=TURN_END,
        additional_special_tokens=[_TURN_START],
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
    wrapped.add_tokens([THINK_START, THINK_END])
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def vocab_rows(tokenizer: PreTrainedTokenizerFast) -> int:
    """Return the number of embedding rows, which is the vocabulary size rounded up to a multiple of
    `_VOCAB_MULTIPLE`."""
    return -(-len(tokenizer) // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
