"""System messages that are not the first: some templates leave them out."""

from __future__ import annotations

from typing import Any

import pytest

from keel.agents.endpoint.errors import ApiError
from tests.agents.endpoint.kit import CHAT, Messages, Policy, ask, recording, user
from tests.agents.episodes import run
from tests.rollout.chat.families import chat_of

NOTE = {"role": "system", "content": "s"}


def test_what_the_template_would_not_show_is_refused() -> None:
    late = [user("a"), {"role": "developer", "content": "b"}]
    run(ask(recording(Policy(["a"])), late))
    leaves_out = chat_of("qwen3")  # Qwen's own does not
    with pytest.raises(ApiError) as refused:
        run(ask(recording(Policy(["a"]), chat=leaves_out), late))
    assert (refused.value.status, refused.value.param) == (400, "messages[1].role")


def test_system_messages_at_many_places_take_few_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    opening, renders = CHAT.opening, 0

    def counted(*told: Any, **more: Any) -> list[int]:
        nonlocal renders
        renders += 1
        return opening(*told, **more)

    monkeypatch.setattr(CHAT, "opening", counted)
    messages = [user("a"), *[NOTE] * 200, *[user("b"), NOTE] * 200, user("c")]
    run(ask(recording(Policy(["a"])), messages))
    assert renders < 12


def test_a_system_message_that_is_hidden_among_shown_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opening = CHAT.opening

    def last_only(messages: Messages, *told: Any, **more: Any) -> list[int]:
        systems = [i for i, message in enumerate(messages) if message["role"] == "system"]
        shown = [one for i, one in enumerate(messages) if i not in systems[:-1]]
        return opening(shown, *told, **more)

    monkeypatch.setattr(CHAT, "opening", last_only)
    with pytest.raises(ApiError, match=r"messages\[1\]\.role"):
        run(ask(recording(Policy(["a"])), [user("a"), NOTE, user("b"), NOTE, user("c")]))
