"""Converts conversations to token ids and back, using the model's chat format."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any

from jinja2 import TemplateError

from keel.model.hub import written_by_code
from keel.rl.turns import THINK, USER_ROLES, Malformed, Message, Parsed, ToolCall, ToolSpec
from keel.rollout.chat.parsing import ParsedCall, ParsedTurn, detect_format, find_thinking_marks
from keel.rollout.chat.render import (
    Encoder,
    call_message,
    check_shown,
    drop_old_thinking,
    map_strings,
    name_of,
    render,
    unmark,
)

_MAX_SHOWN = 300
_KNOWN = "Qwen3, Hermes, DeepSeek-V3.2, GLM-4.5, Llama 3 or gpt-oss"
_PROBE = ToolSpec(
    name="probe",
    description="",
    parameters={"type": "object", "properties": {"text": {"type": "string"}}},
)


class TemplateChat:
    """Implements `keel.rl.turns.Chat` with the chat template of a transformers tokenizer.

    To find the text between two turns, it renders a short conversation and takes everything after
    the assistant message. The constructor detects how the template expects tools and call arguments
    to be passed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools_in_thinking: bool = False,
        ends: Collection[int] = (),
        marks: Sequence[str] = (),
    ) -> None:
        """Detect a tokenizer's chat format. Raises ValueError if the tokenizer has no chat template
        or no tokenizer.json.

        If `tools_in_thinking` is set, the policy calls tools only while thinking. If a turn ends
        before its thinking is closed, the next turn continues it (DeepSeek-V3.2, 2025, Appendix B,
        Table 8). `ends` lists additional tokens that make the engine end a turn
        (`template_checks.ends_of`). `marks` is the `model.thinking_marks` setting.
        """
        self.encoder = Encoder(tokenizer)
        self.name = name_of(tokenizer)
        self._tokenizer, self._coded = tokenizer, written_by_code(tokenizer)
        if not self._coded and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template. Set model.tokenizer to one that has one"
            )
        self.format = detect_format(tokenizer, self.encoder)
        self.tools_in_thinking = tools_in_thinking
        self.marks = find_thinking_marks(tokenizer, marks) or THINK
        controls = self.encoder.controls
        others = (self.encoder.text_of.get(index) for index in ends)
        known = {*self.format.ends, tokenizer.eos_token, *others}
        self.ends: dict[str, int] = {text: controls[text] for text in known if text in controls}
        """Maps the text of each control token that ends a turn to its id."""
        self._end_ids = frozenset(self.ends.values())
        self.tool_modes: set[bool] = set()  # thinking modes of conversations with tools
        self._prefixes: dict[bool, str] = {}
        self._arguments_as_text = False
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": [call_message("call_0", "b", {"c": "d"})]},
            {"role": "tool", "content": "e", "tool_call_id": "call_0", "name": "b"},
        ]
        try:
            self.text(messages, (), thinking=False)
        except ValueError:
            self._arguments_as_text = True

    def with_tools_in_thinking(self) -> TemplateChat:
        result = copy.copy(self)
        result.tools_in_thinking = True
        return result

    @property
    def label(self) -> str:
        return f"{self.name} (format {self.format.name})"

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self._end_ids))

    def opening(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, thinking: bool
    ) -> list[int]:
        """Tokenize the start of a conversation, dropping any thinking before the last user message
        (see `Chat.opening`)."""
        if tools:
            self.tool_modes.add(thinking)
        text = self.text(messages, tools, thinking=thinking)
        check_shown(messages, unmark(text))
        ids = self.encoder.encode(text)
        if not ids:
            raise ValueError(f"{self.name} renders the opening to nothing")
        return ids

    def extend(
        self, ids: Sequence[int], messages: Sequence[Message], *, thinking: bool
    ) -> list[int] | None:
        """Append new messages to `ids`. Returns None if that isn't possible (see `Chat.extend`)."""
        roles = [message["role"] for message in messages]
        if not messages or "assistant" in roles:
            raise ValueError(f"a conversation continues with new messages, not with roles {roles}")
        closed = ids[-1] in self._end_ids
        turn = self._last_turn(ids)
        from_user = any(role in USER_ROLES for role in roles)
        if self.tools_in_thinking:  # an earlier turn may have opened it
            in_thinking = (from_user or not closed) and self.marks.ends_open(self.decode(ids))
        else:
            opened = self.prompt_opens_thinking(thinking=thinking)
            in_thinking = self._parse(turn, (), opened=opened).in_thinking
            if in_thinking and closed:
                return None  # the format closes thinking before a turn ends
        if from_user:
            text = self.decode(ids)
            turns = text.split(self.header)[1:] if self.header else [text]
            if in_thinking or any(self._parse(one, (), opened=False).reasoning for one in turns):
                return None  # the template would drop the thinking
        if not closed and self.format.message:
            _, begun, body = turn.rpartition(self.format.message)
            if not begun or self.format.message_end in body:
                return None  # the turn was cut between two messages
        after, end = self._continuation(messages, thinking=thinking)
        if not closed:
            closing = self._thinking_end() if in_thinking else ""
            return [*ids, *self.encoder.encode(closing + end + after)]
        sampled_end = self.encoder.text_of[ids[-1]]
        if sampled_end != end and not (self.format.equal_ends and end in self.ends):
            return None
        return [*ids, *self.encoder.encode(sampled_end + after)[1:]]

    def parse(
        self,
        sampled: Sequence[int],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        turn: int,
        in_thinking: bool = False,
    ) -> Parsed:
        """Parse a turn that the policy sampled (see `Chat.parse`)."""
        sampled = list(sampled)
        closed = bool(sampled) and sampled[-1] in self._end_ids
        text = self.decode(sampled[:-1] if closed else sampled)
        opened = in_thinking or self.prompt_opens_thinking(thinking=thinking)
        parsed = self._parse(text, tools, opened=opened, tools_in_thinking=self.tools_in_thinking)
        calls: list[ToolCall | Malformed] = []
        for item in parsed.calls:
            call_id = f"call_{turn}_{len(calls)}"
            if isinstance(item, ParsedCall):
                arguments = map_strings(item.arguments, unmark)
                name = unmark(item.name)
                calls.append(ToolCall(call_id=call_id, name=name, arguments=arguments))
            else:
                shown = unmark(item.text)[:_MAX_SHOWN]
                why = unmark(item.why)[:_MAX_SHOWN]
                calls.append(Malformed(call_id=call_id, text=shown, why=why))
        return Parsed(
            content=unmark(self.encoder.remove_special(parsed.content)).strip(),
            reasoning=unmark(self.encoder.remove_special(parsed.reasoning)).strip(),
            closed=closed,
            calls=tuple(calls),
            in_thinking=self.tools_in_thinking and parsed.in_thinking,
        )

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation as text. Everything that does not come from the template is marked
        (see `keel.rollout.chat.render`). With `add_generation_prompt`, the text ends with
        the start of the policy's turn. Raises ValueError if the template rejects the messages."""
        if tools and self.format.name == "plain":
            raise ValueError(
                f"{self.name} writes calls in an unknown format. Use a model with the "
                f"format of {_KNOWN}, or set model.chat_template to such a template"
            )
        shielded = [self._shield_message(message) for message in drop_old_thinking(messages)]
        offered: Any = map_strings([tool.as_json() for tool in tools], self.encoder.shield)
        try:
            return render(
                *(self._tokenizer, shielded, offered),
                thinking=thinking,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError) as error:
            if self._coded:
                raise
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(
                f"{self.name} refuses messages of the roles {roles}: {error}. Set "
                "model.chat_template to one that takes them"
            ) from error

    def _shield_message(self, message: Message) -> dict[str, Any]:
        shielded: dict[str, Any] = {"role": message["role"], "content": ""}
        for key, value in message.items():
            if key in ("content", "reasoning_content") and isinstance(value, str):
                shielded[key] = self.encoder.shield_whole(value)
            elif key == "tool_calls":
                if value:
                    shielded[key] = [self._shield_call(call) for call in value]
            elif key != "role" and value is not None:
                shielded[key] = map_strings(value, self.encoder.shield)
        return shielded

    def _shield_call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        call = map_strings(call, self.encoder.shield)
        function = dict(call.get("function") or call)
        arguments = function.get("arguments") or {}
        if self._arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        elif not self._arguments_as_text and isinstance(arguments, str):
            arguments = json.loads(arguments)
        return {**call, "function": {**function, "arguments": arguments}}

    def turn_ids(
        self,
        messages: Sequence[Message],
        reply: Message,
        after: Sequence[Message],
        tools: Sequence[ToolSpec],
        *,
        thinking: bool,
    ) -> list[int]:
        """Tokenize `reply` as the policy would sample it, including the end of the turn. In some
        formats, the start of the next message (`after`) ends a turn.

        Raises ValueError if the template renders `messages` differently once `reply` follows.
        """
        before = self.text(messages, tools, thinking=thinking)
        whole = self.text([*messages, reply], tools, thinking=thinking, add_generation_prompt=False)
        # Some templates omit a think block at the end of the prompt from the history.
        opened, closed = map(re.escape, (self.marks.open, self.marks.close))
        without_mode = re.sub(rf"(?:{opened}\s*)?(?:{closed}\s*)?\Z", "", before)
        start = next((each for each in (before, without_mode) if whole.startswith(each)), None)
        if start is None:
            raise ValueError(f"{self.label} changes earlier messages once others follow")
        turn = whole[len(start) :]
        reasoning = str(reply.get("reasoning_content") or "")
        if reasoning and turn.startswith(self.marks.close):  # some templates omit it
            turn = self.encoder.shield_whole(reasoning) + turn
        ends = [at + len(end) for end in self.ends if (at := turn.find(end)) >= 0]
        if ends:
            return self.encoder.encode(turn[: min(ends)])
        follows = [one for one in after if one["role"] != "assistant"]
        follows = follows or [{"role": "user", "content": "?"}]
        end = self._continuation(follows, thinking=thinking)[1]
        return self.encoder.encode(turn + end)

    def _prefix(self, thinking: bool) -> str:
        if thinking not in self._prefixes:
            word = "Keelprobe"
            question = [{"role": "user", "content": word}]
            text = self.text(question, (), thinking=thinking)
            self._prefixes[thinking] = text.rpartition(word)[2]
        return self._prefixes[thinking]

    def prompt_opens_thinking(self, *, thinking: bool) -> bool:
        """Return True if the prompt already opens the thinking block, so that the policy only has
        to close it."""
        return self.marks.ends_open(self._prefix(thinking))

    @cached_property
    def header(self) -> str:
        """The text that opens each policy turn, without thinking tags."""
        prefix = self._prefix(True)
        for mark in (self.marks.open, self.marks.close):
            prefix = prefix.replace(mark, "")
        starts = [at for text in self.encoder.controls if (at := prefix.rfind(text)) >= 0]
        # From the last control token on, or the last but one if a pair holds the role.
        role = prefix.find("assistant")
        starts = [at for at in starts if role < 0 or at < role] or starts
        return prefix[max(starts) :].strip() if starts else prefix.strip()

    def _parse(
        self,
        text: str,
        tools: Sequence[ToolSpec],
        *,
        opened: bool,
        tools_in_thinking: bool = False,
    ) -> ParsedTurn:
        return self.format.read(
            text, tools, opened=opened, tools_in_thinking=tools_in_thinking, marks=self.marks
        )

    def _last_turn(self, ids: Sequence[int]) -> str:
        """Return the text of the policy's last turn, possibly preceded by other text."""
        header = self.header
        first = next(
            (i for text, i in self.encoder.controls.items() if header.startswith(text)), -1
        )
        ids = list(ids)
        at = len(ids) - 1 - ids[::-1].index(first) if first in ids else 0
        text = self.decode(ids[at:])
        return text.partition(header)[2] if header and header in text else text

    def _continuation(self, messages: Sequence[Message], *, thinking: bool) -> tuple[str, str]:
        written = repr(messages)
        word = next(w for w in map("Keelword{}x".format, count()) if w not in written)
        answers = [message for message in messages if message["role"] == "tool"]
        calls = [
            call_message(
                str(message.get("tool_call_id") or f"call_{i}"),
                str(message.get("name") or _PROBE.name),
                {"text": word},
            )
            for i, message in enumerate(answers)
        ]

        def render_with(calls: list[dict[str, Any]]) -> str:
            turn = {"role": "assistant", "content": "" if calls else word, "tool_calls": calls}
            tools = (_PROBE,) if calls and self.format.name != "plain" else ()
            question = {"role": "user", "content": "?"}
            return self.text([question, turn, *messages], tools, thinking=thinking)

        try:
            text = render_with(calls)
        except ValueError:
            if len(calls) < 2:
                raise
            text = render_with(calls[:1])  # Llama 3's template allows one call per turn
        _, match, rest = text.rpartition(word)
        known = {*self.ends, *filter(None, [self.format.message_end])}
        ends = [(at, end) for end in known if (at := rest.find(end)) >= 0]
        if not match or not ends:
            raise ValueError(
                f"{self.name} cannot be extended: it ends an assistant message with none "
                f"of {', '.join(self.ends)}. Set model.chat_template or model.tokenizer to one in "
                "which the eos_token ends a turn"
            )
        at, end = min(ends)
        return rest[at + len(end) :], end

    def _thinking_end(self) -> str:
        thought, answer = "Keelthought", "Keelsaid"
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": answer, "reasoning_content": thought},
        ]
        text = self.text(messages, (), thinking=True, add_generation_prompt=False)
        between = text.partition(thought)[2].partition(answer)
        close = self.marks.close
        return between[0] if between[1] and close in between[0] else f"\n{close}\n\n"

    def decode(self, ids: Sequence[int]) -> str:
        """Decode token ids, inserting a mark into text that only looks like a control token."""
        return self.encoder.decode(ids)
