"""The turns that were recorded, and which of them a request goes on from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from keel.agents.conversation import SegmentRecord
from keel.agents.endpoint.errors import ApiError
from keel.agents.endpoint.matching import link
from keel.agents.endpoint.replies import Reply
from keel.agents.endpoint.requests import ChatRequest
from keel.rl.turns import Chat, Message, ToolSpec


@dataclass(slots=True, eq=False)
class Turn:
    """One that is recorded."""

    record: SegmentRecord
    end: int
    """Ids of `record` up to the last sampled one."""
    tools: tuple[ToolSpec, ...]
    tools_key: str
    request_key: str
    reply: Reply
    inside: bool = False
    """It has left its thinking open for the next."""
    lost: bool = False
    """The client went before it got the answer, as far as can be known."""
    given_again: bool = False
    extended: bool = False
    """Another turn goes on from it: so somebody has it."""

    @property
    def ids(self) -> list[int]:
        return list(self.record.ids[: self.end])


class Turns:
    """All turns of a trajectory."""

    def __init__(self, chat: Chat, *, thinking: bool) -> None:
        self._chat, self._thinking = chat, thinking
        self._after: dict[str, list[Turn]] = {}
        """By the key of the messages up to and with the turn."""
        self._answers: dict[str, list[Turn]] = {}
        """By the key of the request."""
        self._by_id: dict[str, Turn] = {}

    def add(self, turn: Turn, messages_key: str) -> None:
        self._after.setdefault(link(messages_key, turn.reply.message), []).append(turn)
        self._answers.setdefault(turn.request_key, []).append(turn)
        self._by_id[turn.reply.reply_id] = turn

    def lose(self, reply: Reply) -> None:
        turn = self._by_id[reply.reply_id]
        turn.lost, turn.given_again = True, False

    def lost(self, request_key: str, asked: ChatRequest) -> Turn | None:
        """An answer to the same request that nobody got, as far as can be known; to a client that
        says that it got none, else one that somebody may have got. ChatRequest again after it was
        received, the request wants another one."""
        free = [
            turn
            for turn in self._answers.get(request_key, ())
            if not (turn.extended or turn.given_again)
        ]
        lost = [turn for turn in free if turn.lost]
        return next(iter([*lost, *free] if asked.is_retry else lost), None)

    def context(
        self,
        asked: ChatRequest,
        keys: Sequence[str],
        tools_key: str,
        growing: Collection[SegmentRecord],
    ) -> tuple[Turn | None, list[int]]:
        """Return the recorded turn that the request goes on from, or None, and the ids of its
        whole context, which begin with the turn's own.

        keys: of the prefixes of its messages. growing: segments in which a turn is being sampled.
        Raises ApiError for messages that the template refuses.
        """
        messages = asked.messages
        said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        new = messages[said[-1] + 1 :] if said else ()
        try:
            if said and all(message["role"] in ("tool", "user") for message in new):
                turns = self._after.get(keys[said[-1] + 1], ())
                same = [turn for turn in turns if turn.tools_key == tools_key]
                last = messages[said[-1]]
                thought = last.get("reasoning_content")
                # Of turns that look the same, the one whose thinking the client sent back, then one
                # with the same white space, then one that nobody has gone on from, then the last.
                same.sort(
                    key=lambda t: (
                        thought is not None and t.reply.message.get("reasoning_content") == thought,
                        t.reply.message["content"] == last["content"],
                        not t.extended and t.record not in growing,
                    )
                )
                for turn in reversed(same):
                    ids = self._chat.extend(turn.ids, new, thinking=self._thinking)
                    if ids is not None:
                        return turn, ids
            shown = self.as_recorded(messages, keys)
            ids = self._chat.opening(shown, asked.tools, thinking=self._thinking)
            self._check_shown(shown, asked.tools, ids)
        except StopIteration as error:  # the chat format marks texts with two of these
            message = "messages: hold all private-use characters of Unicode's last plane"
            raise ApiError(400, message, param="messages") from error
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
        return self._beginning_of(ids), ids

    def _beginning_of(self, ids: list[int]) -> Turn | None:
        """Return the last turn of the longest record that a rendered context begins with. A turn
        that left its thinking open is none: where the rendered context stands is not known."""
        ends = [
            turn
            for turn in self._by_id.values()
            if turn.end == len(turn.record.ids) < len(ids) and not turn.inside
        ]
        return max(
            (turn for turn in ends if ids[: turn.end] == turn.ids),
            key=lambda turn: turn.end,
            default=None,
        )

    def as_recorded(self, messages: Sequence[Message], keys: Sequence[str]) -> list[Message]:
        """Return the messages with the policy's turns as they were recorded: a client may have
        dropped their thinking, which the format shows until the next user's message."""
        shown: list[Message] = []
        for i, message in enumerate(messages):
            turns = self._after.get(keys[i + 1], ()) if message["role"] == "assistant" else ()
            shown.append(turns[-1].reply.message if turns else message)
        return shown

    def _check_shown(
        self, messages: list[Message], tools: Sequence[ToolSpec], ids: list[int]
    ) -> None:
        """Some templates leave out a system message that is not the first one, without a word.
        Looked for at the first and the last place between messages of the same two roles: each
        takes a render of the whole conversation."""
        roles = [message["role"] for message in messages]
        first: dict[tuple[str, ...], int] = {}
        last: dict[tuple[str, ...], int] = {}
        for i, message in enumerate(messages):
            if i and message["role"] == "system" and message["content"]:
                between = (roles[i - 1], *roles[i + 1 : i + 2])
                first.setdefault(between, i)
                last[between] = i
        for i in sorted({*first.values(), *last.values()}):
            others = messages[:i] + messages[i + 1 :]
            if self._chat.opening(others, tools, thinking=self._thinking) == ids:
                raise ApiError(
                    400,
                    f"messages[{i}].role: the model's chat template does not show a system "
                    "message at this place; put it first",
                    param=f"messages[{i}].role",
                )
