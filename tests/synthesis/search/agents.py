"""Scripted agents on the small corpus: an author, answerers and a verifier."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from keel.configs.synthesis import AnswererConfig, SearchTasksConfig
from keel.rl.turns import Message, ToolCall, ToolSpec
from keel.synthesis.author import AuthorReply
from keel.synthesis.search.pipeline import SearchPipeline
from tests.agents.environments.search.corpus import write_corpus
from tests.synthesis.authors import ScriptedAuthor

QUESTION = (
    "A bridge near Oakford was opened in 1911, and its designer left notebooks. Who founded the "
    "society whose archive keeps them?"
)
EVIDENCE = (
    {
        "claim": "The bridge of 1911 was designed by Mirela Dancu.",
        "document": "bridge.md",
        "quote": "designed by the engineer Mirela Dancu",
    },
    {
        "claim": "Her notebooks are with the Corvane Society.",
        "document": "people.jsonl#dancu",
        "quote": "Her notebooks are kept in the archive of the Corvane Society",
    },
    {
        "claim": "Tobias Wrenfield founded it.",
        "document": "society.html",
        "quote": "founded in 1874 by Tobias Wrenfield",
    },
)
SUBMITTED = {
    "question": QUESTION,
    "answer": "Tobias Wrenfield",
    "other_spellings": ["T. Wrenfield"],
    "evidence": list(EVIDENCE),
}


def submitted(**changes: Any) -> dict[str, Any]:
    return {**SUBMITTED, **changes}


def calls(name: str, *arguments: Mapping[str, Any]) -> AuthorReply:
    return AuthorReply(
        content="",
        calls=tuple(
            ToolCall(call_id=f"{name}{number}", name=name, arguments=one)
            for number, one in enumerate(arguments)
        ),
    )


def opens(*names: str) -> AuthorReply:
    return calls("open", *({"document": name} for name in names))


@dataclass
class Agents:
    """Scripted replies by role."""

    submits: list[dict[str, Any]] = field(default_factory=lambda: [SUBMITTED])
    """Submissions in order; the last one repeats."""
    answers: list[str] = field(default_factory=lambda: ["Mirela Dancu", "Tobias Wrenfeld"])
    """Answers of the agents in turn."""
    verdicts: list[dict[str, str]] = field(default_factory=list[Any])
    """Verdicts by answer for each pass; missing ones are correct."""
    opened: tuple[str, ...] = ("bridge.md", "people.jsonl#dancu", "society.html")
    judged: dict[str, str] = field(default_factory=dict[str, str])
    """Verdict on all criteria, by answer."""
    _submitted: int = 0
    _answered: int = 0
    _passes: int = 0

    def __call__(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], purpose: str
    ) -> AuthorReply | str:
        began = not any(message["role"] == "assistant" for message in messages)
        if purpose == "question":
            if began:
                return opens(*self.opened)
            submission = self.submits[min(self._submitted, len(self.submits) - 1)]
            self._submitted += 1
            return calls("submit", submission)
        if purpose == "answer":
            self._answered += 1
            return self.answers[(self._answered - 1) % len(self.answers)]
        if purpose == "verifier":
            return opens("society.html") if began else self._decide(messages)
        assert purpose == "judge", purpose
        return self._judge(messages)

    def _decide(self, messages: Sequence[Message]) -> AuthorReply:
        labels = material(messages[1])["answers"]
        overrides = self.verdicts[self._passes] if self._passes < len(self.verdicts) else {}
        self._passes += 1
        should = {"Tobias Wrenfield": "right", "T. Wrenfield": "right"}
        verdicts = [
            {
                "answer": label,
                "reason": "r",
                "verdict": overrides.get(answer, should.get(answer, "wrong")),
                "document": "society.html",
                "quote": overrides.get("quote", "founded in 1874 by Tobias Wrenfield"),
            }
            for label, answer in labels.items()
        ]
        return calls("decide", {"verdicts": verdicts})

    def _judge(self, messages: Sequence[Message]) -> str:
        verdict = self.judged[material(messages[1])["answer"]]
        schema = json.loads(str(messages[0]["content"]).rpartition("The schema: ")[2])
        one = {"reason": "r", "verdict": verdict}
        return json.dumps(dict.fromkeys(schema["required"], one))


def material(message: Message) -> dict[str, Any]:
    """Content between the fences."""
    return json.loads(str(message["content"]).split("\n")[-2])


@dataclass
class World:
    """A pipeline and its requests."""

    pipeline: SearchPipeline
    author: ScriptedAuthor
    folder: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        path = self.folder / "tasks.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def config_of(folder: Path, **knobs: Any) -> SearchTasksConfig:
    corpus = folder / "corpus"
    if not corpus.exists():
        write_corpus(corpus)
    base = SearchTasksConfig(
        corpus=str(corpus),
        index=str(folder / "index"),
        count=1,
        answerers=(AnswererConfig(), AnswererConfig(system="Guess.", tools=False)),
        depth=3,
        breadth=3,
        tries=1,
    )
    return replace(base, **knobs)


def world_of(
    folder: Path, agents: Agents | None = None, author: ScriptedAuthor | None = None, **knobs: Any
) -> World:
    author = author or ScriptedAuthor(agents or Agents())
    config, out = config_of(folder, **knobs), folder / "out"
    out.mkdir(exist_ok=True)
    pipeline = SearchPipeline(config, author, lambda _: author, out, seed=1)
    return World(pipeline, author, out)
