"""Microseconds that a turn of a conversation costs the engine's process, by part. No GPU needed.

    python -m benchmarks.rollout.turns                    # 256 conversations of 600 to 2,100 tokens
    python -m benchmarks.rollout.turns --opening 4000
    python -m benchmarks.rollout.turns --against OTHER    # beside another checkout, round by round

Conversations take turns of 200 tokens; after each a tool says 20 within 13 steps, and after 8
another one begins. Steps come one after the other, since there is no model to wait for, and nothing
ends a turn but its length. What is counted is CPU time of the engine's thread (others may use the
machine), without that of the stand-in for the model. *above quiet steps*: what turns cost beyond
the steps in which none begins and none ends. Parts overlap: `schedule` is a part of `step`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from keel.configs.schema import RolloutConfig
from keel.rl.turns import TurnRequest, TurnResult
from keel.rollout.spec import environment

TURNS, TURN, TOOL, TOOL_STEPS = 8, 200, 20, 13
WARM, COUNTED = 600, 1500
"""Turns."""
RUN_S = 900


class Talk:
    """Conversations, one after the other, in one seat."""

    def __init__(self, seat: int, opening: int) -> None:
        self._draw = np.random.default_rng(seat)
        self._seat, self._opening, self._number, self._turn = seat, opening, 0, 0
        self._ids, self._rows = self._words(opening), 0

    def _words(self, count: int) -> Any:
        return self._draw.integers(30, 90, count).astype(np.int32)

    def ask(self, tokens: int = TURN) -> TurnRequest:
        return TurnRequest(
            conversation=f"{self._seat}.{self._number}",
            token_ids_T=self._ids.copy(),
            max_tokens=tokens,
            seed=self._seat * 1000 + self._turn,
            routes_from=self._rows,
            stop_ids=(2,),
        )

    def take(self, result: TurnResult) -> None:
        self._turn += 1
        self._rows = len(self._ids) + len(result.token_ids_N) - 1
        self._ids = np.concatenate([self._ids, result.token_ids_N, self._words(TOOL)])
        # The first conversations are of fewer turns, so that not all end together.
        if self._turn + (0 if self._number else self._seat % TURNS) >= TURNS:
            self._ids, self._rows = self._words(self._opening), 0
            self._number, self._turn = self._number + 1, 0


class Clock:
    """CPU seconds of this thread in each of an engine's parts."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, part: str) -> None:
        call = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += time.thread_time() - began

        setattr(owner, method, timed)


def measure(seats: int, opening: int) -> dict[str, float]:
    """One run, in this process."""
    variables = environment(RolloutConfig(), gpu=False) | {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    os.environ.update(variables)  # before vLLM is imported
    from benchmarks.rollout.no_model import engine_without_model  # noqa: PLC0415
    from keel.rollout.vllm_internals import scheduler_of  # noqa: PLC0415

    context = opening + TURNS * (TURN + TOOL)
    with tempfile.TemporaryDirectory() as scratch:
        engine = engine_without_model(Path(scratch), seats=seats, context=context)
    scheduler, model, clock = scheduler_of(engine._llm), engine._llm.model_executor, Clock()
    clock.watch(engine, "add_turn", "begin a turn")
    clock.watch(scheduler, "schedule", "schedule")
    clock.watch(scheduler, "update_from_output", "take tokens")
    clock.watch(engine._llm.output_processor, "process_outputs", "pass on")
    clock.watch(engine._recorder, "take", "put together")
    sampling, jobs = engine.spec.config.sampling, 0
    talks: dict[int, Talk] = {}
    later: list[tuple[int, int, Talk]] = []
    quiet: list[float] = []
    steps = ended = 0

    def ask(talk: Talk, tokens: int = TURN) -> None:
        nonlocal jobs
        talks[jobs] = talk
        engine.add_turn(jobs, talk.ask(tokens), sampling=sampling, record=True)
        jobs += 1

    def run(turns: int) -> None:
        nonlocal steps, ended
        until = ended + turns
        while ended < until:
            while later and later[0][0] <= steps:
                ask(heapq.heappop(later)[2])
            fast, without, began = scheduler.fast_steps, model.seconds, time.thread_time()
            results: list[Any] = list(engine.step())
            took = time.thread_time() - began - (model.seconds - without)
            clock.seconds["step"] += took
            if not results and scheduler.fast_steps > fast:
                quiet.append(took)
            for job, result in results:
                talk = talks.pop(job)
                talk.take(result)
                ended += 1
                heapq.heappush(later, (steps + TOOL_STEPS, ended, talk))
            steps += 1

    for seat in range(seats):
        ask(Talk(seat, opening), 1 + (seat * 61) % TURN)
    run(WARM)
    clock.seconds.clear()
    quiet.clear()
    before, since = ended, steps
    fast = scheduler.fast_steps
    run(COUNTED)
    turns, passed = ended - before, steps - since
    total = clock.seconds["step"] + clock.seconds["begin a turn"]
    still = statistics.median(quiet)
    return {
        "us a turn": 1e6 * total / turns,
        "us a turn above quiet steps": 1e6 * (total - still * passed) / turns,
        "us a quiet step": 1e6 * still,
        "share of places in use": turns * TURN / (passed * seats),
        "share of fast steps": (scheduler.fast_steps - fast) / passed,
        **{f"us a turn: {part}": 1e6 * took / turns for part, took in clock.seconds.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--opening", type=int, default=600, help="tokens of a conversation's first")
    parser.add_argument("--seats", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--against", type=Path, help="another checkout, with these two files")
    parser.add_argument("--one", action="store_true", help="one run in this process, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.seats, options.opening)))
        return
    trees = {"this": Path(__file__).parents[2]}
    if options.against:
        trees["other"] = options.against.resolve()
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for _ in range(options.rounds):
        for name, tree in trees.items():
            command = [sys.executable, "-m", "benchmarks.rollout.turns", "--one"]
            command += ["--seats", str(options.seats), "--opening", str(options.opening)]
            run = subprocess.run(
                command,
                cwd=tree,
                env=os.environ | {"PYTHONPATH": str(tree)},
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
            if run.returncode:
                raise RuntimeError(f"{tree}: {run.stderr[-2000:]}")
            rounds[name].append(json.loads(run.stdout.splitlines()[-1]))
    print(f"{'':36}" + "".join(f"{name:>20}" for name in trees))
    for row in rounds["this"][0]:
        cells = (" ".join(f"{one[row]:.4g}" for one in rounds[name]) for name in trees)
        print(f"{row:36}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()
