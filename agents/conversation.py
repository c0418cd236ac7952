"""Records a conversation as training segments. A segment is a context that only ever grows, one
turn at a time. If the context is changed instead of extended, a new segment begins. This way, each
sampled token is trained exactly once and after exactly the token ids that preceded it during
sampling."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np

from keel.rl.recordings import StoredRecordings
from keel.rl.turns import (
    Chat,
    Message,
    Parsed,
    ToolSpec,
    TurnRequest,
    TurnResult,
    message_of,
    seed_of,
)
from keel.rl.types import Segment


class SegmentRecord:
    """A growing context and the turns sampled from it. Each turn returns expert routes only for
    tokens that no earlier turn has processed. The last token of a turn is processed in the next
    turn."""

    def __init__(self, prompt_id: str, context: Sequence[int]) -> None:
        self._prompt_id = prompt_id
        self.ids = list(context)
        self._turns: list[tuple[int, TurnResult]] = []
        """Each turn's result, with the position of its first sampled token."""
        self.routed_tokens = 0
        """Number of tokens that the turns have processed, whose expert routes are recorded."""

    @property
    def turns(self) -> int:
        return len(self._turns)

    @property
    def sampled_tokens(self) -> int:
        return sum(len(result.token_ids_R) for _, result in self._turns)

    def append_turn(self, request: TurnRequest, result: TurnResult) -> None:
        """Append a turn to the segment. Raises ValueError if the result is incomplete or was
        sampled from another context."""
        context, sampled = len(self.ids), len(result.token_ids_R)
        name = f"conversation {request.conversation}"
        if len(request.token_ids_T) != context or request.routes_from != self.routed_tokens:
            raise ValueError(f"{name}: a turn of an older context")
        routed = max(context + sampled - 1, self.routed_tokens)
        rows = routed - self.routed_tokens
        expected = {"sampling_mask": sampled, "routes_TLK": rows, "selected_TLb": rows}
        lengths = {"logp_old_R": len(result.logp_old_R), "version_R": len(result.version_R)}
        for field, length in {**lengths, **_lengths(result)}.items():
            if length != expected.get(field, sampled):
                raise ValueError(
                    f"{name}: {field} has {length} entries, expected {expected.get(field, sampled)}"
                )
        first = self._turns[0][1] if self._turns else result
        if ("routes_TLK" in _lengths(result)) != ("routes_TLK" in _lengths(first)):
            raise ValueError(f"{name}: only some of its turns have routes")
        self._turns.append((context, result))
        self.ids += result.token_ids_R.tolist()
        self.routed_tokens = routed

    def drop_extension(self) -> None:
        """Remove the ids after the last turn, because its messages are tokenized again together
        with later ones."""
        start, result = self._turns[-1]
        del self.ids[start + len(result.token_ids_R) :]

    def extend(self, ids: Sequence[int]) -> None:
        """Extend the context to `ids`. Raises ValueError if `ids` doesn't start with the current
        context."""
        if list(ids[: len(self.ids)]) != self.ids:
            raise ValueError(f"conversation of {self._prompt_id}: an extension changes earlier ids")
        self.ids += ids[len(self.ids) :]

    def segment(self) -> Segment | None:
        spans = [(start, result) for start, result in self._turns if len(result.token_ids_R) > 0]
        if not spans:
            return None
        tokens = spans[-1][0] + len(spans[-1][1].token_ids_R)
        trainable, logp = np.zeros(tokens, np.bool_), np.zeros(tokens, np.float32)
        versions = np.full(tokens, -1, np.int32)
        for start, result in spans:
            part = slice(start, start + len(result.token_ids_R))
            trainable[part], logp[part] = True, result.logp_old_R
            versions[part] = result.version_R
        recorded = [(start, result.recordings) for start, result in self._turns]
        stored = [(start, one) for start, one in recorded if one is not None]
        return Segment(
            prompt_id=self._prompt_id,
            token_ids_T=np.array(self.ids[:tokens], np.int32),
            trainable_T=trainable,
            logp_old_T=logp,
            version_T=versions,
            stored=StoredRecordings.concat(stored, tokens) if stored else None,
        )


def _lengths(turn: TurnResult) -> Mapping[str, int]:
    return {} if turn.recordings is None else turn.recordings.lengths


def segments_of(records: Iterable[SegmentRecord]) -> tuple[Segment, ...]:
    segments = (record.segment() for record in records)
    return tuple(segment for segment in segments if segment is not None)


class Conversation:
    """The messages of a conversation and the token segments to train on."""

    def __init__(
        self,
        *,
        name: str,
        prompt_id: str,
        chat: Chat,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec],
        thinking: bool,
    ) -> None:
        self.name = name
        self.tools = tuple(tools)
        self.thinking = thinking
        self.opening = tuple(messages)
        """The first messages, which every context contains."""
        self.context: list[Message] = list(messages)
        self.transcript: list[Message] = list(messages)
        """All messages so far, including those removed from the context."""
        self._chat = chat
        self._prompt_id = prompt_id
        self._records: list[SegmentRecord] = []
        self._in_thinking = False
        """True if the last turn ended inside the thinking, which the next turn continues."""
        self._begin_segment()

    @property
    def ids(self) -> Sequence[int]:
        return self._records[-1].ids

    @property
    def sampled_tokens(self) -> int:
        return sum(record.sampled_tokens for record in self._records)

    def request(self, *, max_tokens: int, seed: int, timeout_s: float = inf) -> TurnRequest:
        """Build the request for the next turn. Its seed depends on the number of turns so far, not
        on the number of calls."""
        if self.context[-1]["role"] == "assistant":
            raise ValueError(f"conversation {self.name}: the last message is the policy's own")
        record = self._records[-1]
        return TurnRequest(
            conversation=self.name,
            token_ids_T=np.array(record.ids, np.int32),
            max_tokens=max_tokens,
            seed=seed_of(seed, len(self._records) - 1, record.turns),
            timeout_s=timeout_s,
            routes_from=record.routed_tokens,
            stop_ids=self._chat.stop_ids,
        )

    def append_turn(self, request: TurnRequest, result: TurnResult) -> Parsed:
        turn = sum(record.turns for record in self._records)
        self._records[-1].append_turn(request, result)
        parsed = self._chat.parse(
            result.token_ids_R.tolist(),
            self.tools,
            thinking=self.thinking,
            turn=turn,
            in_thinking=self._in_thinking,
        )
        self._in_thinking = parsed.in_thinking
        self.note_messages([message_of(parsed)])
        return parsed

    def continue_with(self, messages: Sequence[Message]) -> None:
        """Append the messages that follow a turn, and tokenize all messages since that turn. A new
        segment starts if the chat format can't extend the ids of the turn."""
        record, extended = self._records[-1], None
        if record.turns:
            turn = max(i for i, one in enumerate(self.context) if one["role"] == "assistant")
            record.drop_extension()
            new = [*self.context[turn + 1 :], *messages]
            extended = self._chat.extend(record.ids, new, thinking=self.thinking)
        self.note_messages(messages)
        if extended is None:
            self._begin_segment()
        else:
            record.extend(extended)

    def ask(self, question: str) -> None:
        """Ask the policy a question. After a tool result, the question is appended to that result,
        because a new user message would end the thinking."""
        last = self.context[-1]
        if last["role"] != "tool":
            self.continue_with([{"role": "user", "content": question}])
            return
        result = {**last, "content": f"{last['content']}\n\n{question}"}
        self.context[-1] = result
        self.transcript = [result if message is last else message for message in self.transcript]
        self.continue_with(())

    def note_messages(self, messages: Sequence[Message]) -> None:
        self.context += messages
        self.transcript += messages

    def rewrite(self, messages: Sequence[Message]) -> None:
        """Start a new segment with `messages` as its context. The transcript stays unchanged."""
        self.context = list(messages)
        self._begin_segment()

    def segments(self) -> tuple[Segment, ...]:
        return segments_of(self._records)

    def _begin_segment(self) -> None:
        self._in_thinking = False
        if self._records and not self._records[-1].turns:
            self._records.pop()
        ids = self._chat.opening(self.context, self.tools, thinking=self.thinking)
        self._records.append(SegmentRecord(self._prompt_id, ids))
