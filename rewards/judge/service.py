"""The judge for code that does not run in an event loop: completions in, futures out."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

from keel.rewards.judge.judge import Judge
from keel.rewards.judge.results import Counts, Failed, Judged, JudgeSettings, Server
from keel.rewards.text import final_text, thinking_text
from keel.rl.types import Prompt, Trajectory

CLOSE_S = 10.0
"""Longest wait for the thread to end."""


class JudgeService:
    """A `Judge` in a thread of its own. A context manager."""

    def __init__(
        self, settings: JudgeSettings, *, server: Server | None = None, backoff_s: float = 0.5
    ) -> None:
        """As `Judge`. Raises ValueError naming the knob."""
        self._judge = Judge(settings, server=server, backoff_s=backoff_s)
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="judge", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, trajectory: Trajectory) -> Future[Judged | Failed]:
        """Judge the final answer of `trajectory`. The future raises what `Judge.judge` raises."""
        messages = trajectory.messages
        return self.submit_text(prompt, final_text(messages), thinking=thinking_text(messages))

    def submit_text(
        self, prompt: Prompt, answer: str, *, thinking: str = ""
    ) -> Future[Judged | Failed]:
        """Judge `answer`. Every wait inside has a deadline, so the future is done some day."""
        if self._closed:
            raise RuntimeError("the judge is closed")
        return asyncio.run_coroutine_threadsafe(
            self._judge.judge(prompt, answer, thinking=thinking), self._loop
        )

    def check_reachable(self) -> None:
        """Raises ValueError if the judge does not give one small judgement in due form, and
        JudgeStopped if it is served by this run and does not start."""
        asyncio.run_coroutine_threadsafe(self._judge.check_reachable(), self._loop).result()

    def counts(self) -> Counts:
        """What has been done so far."""
        return self._judge.counts()

    def close(self) -> None:
        """End the thread. Judgements that are under way are cancelled."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)

    def __enter__(self) -> JudgeService:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(self._judge.close())
        self._loop.close()
