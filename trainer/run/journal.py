"""The written side of a run: metrics, TensorBoard and readable trajectories.

A resumed run drops what an interrupted one wrote past its checkpoint, so each step stands in the
files once.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from keel.rl.metrics import Metric, values
from keel.rl.records import scored_record
from keel.rl.types import ScoredGroup, Trajectory
from keel.trainer.run.alarms import Alarms
from keel.trainer.run.batches import FOLDER as BATCHES
from keel.trainer.run.batches import drop_after
from keel.trainer.run.manifest import sync, sync_folder
from keel.trainer.run.trajectory_files import TOKENS, TokenFile, choose
from keel.trainer.run.view import View

EVENTS = "events.jsonl"
"""What happened besides steps: `resume`, `alarm`, `engine` (one was started again), `frozen` (a
process stands still, or was ended for it), `restart` (of all, from a checkpoint; what a start waits
for), `fewer` (with less than all ranks), `ledger` (what became of the prompts), `tracker` (where
the curves are, and what became of sending them), `end` (what engines or rewards ended the run
with). Nothing is taken out of it: what a resumed run does again has happened twice."""
Hook = Callable[[threading.ExceptHookArgs], object]
SPANS = 4
"""Gaps in a record that are named."""
REPAIR = "repair the line or take it out"


class Journal:
    """Writes each step into the run folder and hands it to the terminal view."""

    def __init__(
        self,
        folder: Path,
        view: View,
        *,
        trajectories: int,
        every: bool = False,
        tokenizer: str = "",
        tokens: TokenFile | None = None,
        alarms: Alarms | None = None,
        resumed_at: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`trajectories`: how many to write out a step; `every`: all of them, as JSON.
        `tokenizer`: the digest of the policy's. `tokens`: writes them with every token's numbers.
        `alarms`: looks at each step. `resumed_at`: the last one to keep."""
        self._view, self._alarms = view, alarms
        self.written: Callable[[], None] = lambda: None
        """Called whenever a step or an event stands in the folder."""
        self._every, self._tokenizer = every, tokenizer
        self._clock = clock
        self._per_step, self._tokens = trajectories, tokens
        self._metrics = folder / "metrics.jsonl"
        self._step = resumed_at
        self._trajectories = folder / "trajectories"
        self._trajectories.mkdir(parents=True, exist_ok=True)
        keep_until(self._metrics, resumed_at)
        for path in files_after(self._trajectories, resumed_at):
            path.unlink()
        drop_after(folder, resumed_at)
        if resumed_at:
            steps = lacking(self._metrics, resumed_at)
            gap = f"; {self._metrics.name} lacks {steps}" if steps else ""
            self.note("resume", f"resumed after step {resumed_at}{gap}")
        # A third of a second, which a check need not wait for.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        threading.excepthook = hooked(threading.excepthook)
        self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_at + 1)

    def begin(self, activity: str) -> None:
        self._view.begin(activity)

    def reach(self, done: int, total: int, unit: str) -> None:
        self._view.reach(done, total, unit)

    def say(self, kind: str, text: str) -> None:
        """Tell people, and keep it in `events.jsonl`."""
        self.note(kind, text)
        self._view.say(text)

    @property
    def step(self) -> int:
        """The last one that is written."""
        return self._step

    @property
    def ends(self) -> str:
        """Why the run has to end, if an alarm says so."""
        return self._alarms.ends if self._alarms is not None else ""

    def note(self, kind: str, text: str) -> None:
        """Keep it in `events.jsonl`."""
        note(self._metrics.parent, self._step, kind, text, self._clock())
        self.written()

    def record(
        self,
        step: int,
        metrics: Mapping[str, Metric],
        sample: Sequence[ScoredGroup],
        discarded: Sequence[ScoredGroup] = (),
    ) -> None:
        """Raises `OSError` naming the folder if it cannot be written."""
        numbers = {name: value for name, value in values(metrics).items() if math.isfinite(value)}
        lines: list[str] = []
        if self._alarms is not None and step > 0:
            numbers["alarms"], lines = self._alarms.look(step, numbers, [*sample, *discarded])
        try:
            self._write(step, numbers, sample)
        except OSError as error:
            raise OSError(
                f"run.dir = {self._metrics.parent}: step {step} cannot be written ({error}). The "
                "run can be resumed from its last checkpoint"
            ) from error
        self._step = step
        self.written()
        for line in lines:
            self.say("alarm", line)
        self._view.record(step, numbers)

    def evaluated(self, step: int) -> bool:
        """Whether anything of held-out sets is written of a step."""
        found = steps_of(self._metrics)
        return any(name.startswith("eval/") for name in found.get(step, {}))

    def _write(
        self, step: int, numbers: Mapping[str, float], sample: Sequence[ScoredGroup]
    ) -> None:
        line = {"step": step, "time": round(self._clock(), 3), **dict(sorted(numbers.items()))}
        with self._metrics.open("a") as file:
            file.write(json.dumps(line) + "\n")
        for name, value in numbers.items():
            self._board.add_scalar(name, value, step)
        self._board.flush()
        if chosen := choose(sample, self._per_step):
            text = "\n".join(describe(group, index) for group, index in chosen)
            (self._trajectories / f"step_{step:06d}.txt").write_text(
                text,
                encoding="utf-8",
                errors="replace",  # half a surrogate pair, say
            )
        if chosen and self._tokens is not None:
            self._tokens.write(self._trajectories / f"step_{step:06d}{TOKENS}", sample)
        if self._every:
            chosen = [(group, i) for group in sample for i in range(len(group.rewards_G))]
        if chosen:
            self._write_records(step, chosen)

    def _write_records(self, step: int, chosen: Sequence[tuple[ScoredGroup, int]]) -> None:
        lines = [
            json.dumps({"step": step, **scored_record(group, i, tokenizer=self._tokenizer)}) + "\n"
            for group, i in chosen
        ]
        fresh = self._trajectories / f"step_{step:06d}.tmp"
        fresh.write_text("".join(lines))  # whole or not at all: `keel sft` may be reading along
        fresh.replace(fresh.with_suffix(".jsonl"))

    def close(self) -> None:
        try:
            self._board.close()
        except OSError as error:  # which must not hide the one that has ended the run
            self._view.say(f"warning: TensorBoard's curves lack their end ({error})")


def hooked(before: Hook) -> Hook:
    """As `before`, without a word of a disk that TensorBoard's thread cannot write to: whoever
    waits for what it writes is told, and says so in a line."""

    def hook(raised: threading.ExceptHookArgs) -> None:
        ours = type(raised.thread).__module__.startswith("tensorboard.")
        if not (ours and issubclass(raised.exc_type, OSError)):
            before(raised)

    hook.of_keel = True  # pyright: ignore[reportFunctionMemberAccess]
    return before if getattr(before, "of_keel", False) else hook


def note(folder: Path, step: int, kind: str, text: str, at: float | None = None) -> None:
    """A line of `events.jsonl`. at: seconds since the epoch, if not now."""
    when = round(time.time() if at is None else at, 3)
    line = {"step": step, "time": when, "kind": kind, "text": text}
    # A disk that is full ends the run at the next step, with better words.
    with suppress(OSError), (folder / EVENTS).open("ab+") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
        cut = file.read(1) not in (b"", b"\n")  # by a full disk, or a power cut
        file.write(b"\n" * cut + json.dumps(line).encode() + b"\n")


def keep_until(path: Path, step: int) -> None:
    """Drop the lines of `metrics.jsonl` past `step`, and a last line cut short by a crash. Raises
    as `metric_lines` does."""
    if not path.exists():
        return
    kept = [line for of, line in metric_lines(path) if step and of <= step]
    fresh = path.with_suffix(".tmp")
    fresh.write_text("".join(line + "\n" for line in kept))
    sync(fresh)
    fresh.replace(path)


def to_disk(folder: Path, after: int) -> None:
    """Bring to the disk what a run has written: its metrics and events, and the trajectories and
    batches of the steps past `after`. Raises `OSError` naming what cannot be."""
    folders = [folder / "trajectories", folder / BATCHES]
    files = [path for kind in folders for path in files_after(kind, after)]
    for path in (folder / "metrics.jsonl", folder / EVENTS, *files):
        with suppress(FileNotFoundError):  # a user's doing, or there is none yet
            sync(path)
    for path in (folder, *folders):
        with suppress(FileNotFoundError):
            sync_folder(path)


def files_after(folder: Path, step: int) -> list[Path]:
    """Those of later steps; what has another name is a user's, and so are folders."""
    later: list[Path] = []
    for name in os.listdir(folder) if folder.is_dir() else ():
        kind, _, of = name.partition(".")[0].partition("_")
        # A path only for those: a run of 20,000 steps has three times as many files, at each
        # checkpoint.
        if kind == "step" and of.isdecimal() and int(of) > step:
            later.append(folder / name)
    return [path for path in later if path.is_file()]


def lacking(path: Path, until: int) -> str:
    """The steps from 1 to `until` that have no line in `metrics.jsonl`, in words: "steps 3 to 5 and
    7"; "" where all have. Raises as `metric_lines` does."""
    there = {step for step, _ in metric_lines(path)}
    missing = [step for step in range(1, until + 1) if step not in there]
    spans: list[tuple[int, int]] = []
    for step in missing:
        begins = spans.pop()[0] if spans and spans[-1][1] == step - 1 else step
        spans.append((begins, step))
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in spans[:SPANS]]
    if more := sum(b - a + 1 for a, b in spans[SPANS:]):
        words.append(f"{more} more")
    listed = " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)
    return f"step{'s' * (len(missing) > 1)} {listed}" if missing else ""


def metric_lines(path: Path) -> list[tuple[int, str]]:
    """Step and text of each line of `metrics.jsonl`, but for a last one cut short by a crash; none
    before the first.

    Raises ValueError naming file and line for one that no run can have written.
    """
    texts = path.read_text().splitlines() if path.exists() else []
    found: list[tuple[int, str]] = []
    for number, text in enumerate(texts, start=1):
        try:
            record = json.loads(text)
        except json.JSONDecodeError as error:
            if number == len(texts):
                break
            raise ValueError(f"{path}:{number}: not JSON: {error.msg}; {REPAIR}") from error
        step = record.get("step") if isinstance(record, dict) else None
        if not isinstance(step, int):
            raise ValueError(f"{path}:{number}: not an object with a whole number `step`; {REPAIR}")
        found.append((step, text))
    return found


def steps_of(path: Path) -> dict[int, dict[str, Any]]:
    """Step → its line of `metrics.jsonl`, together with that of an evaluation which was made when
    the run went on. Raises as `metric_lines` does."""
    found: dict[int, dict[str, Any]] = {}
    for step, text in metric_lines(path):
        found[step] = {**json.loads(text), **found.get(step, {})}
    return found


def describe(scored: ScoredGroup, index: int) -> str:
    """One trajectory as text: prompt, answer, what it was worth and why."""
    prompt, answer = scored.group.prompt, scored.group.trajectories[index]
    parts = ", ".join(f"{name} {value:g}" for name, value in scored.parts_G[index].items())
    head = (
        f"=== {prompt.prompt_id}  answer {answer.sibling + 1}  "
        f"reward {scored.rewards_G[index]:g} ({parts})  "
        f"advantage {scored.advantages_G[index]:+.3f}  {answer.sampled_tokens} tokens, "
        f"{answer.finish_reason}"
    )
    asked = () if prompt.environment else prompt.messages  # else it is in the transcript
    said = [spoken(message) for message in (*asked, *answer.messages)]
    return "\n".join([head, *work_done(answer), *said, ""])


def work_done(trajectory: Trajectory) -> list[str]:
    """What its turns took, and what the environment found."""
    usage, verdict = trajectory.usage, trajectory.verdict
    lines: list[str] = []
    if usage is not None:
        lines.append(
            f"    {usage.turns} turns, {usage.calls} calls ({usage.failed_calls} failed, "
            f"{usage.malformed_calls} of them malformed), {len(trajectory.segments)} contexts "
            f"({usage.rewrites} rewritten), {usage.cached_tokens} of {usage.repeated_tokens} "
            f"repeated tokens from the cache, {usage.sampling_s:.2f} s in engines, "
            f"{usage.tools_s:.2f} s in tools"
        )
    if verdict is not None and verdict.facts:
        facts = json.dumps(dict(verdict.facts), ensure_ascii=False, default=str)
        lines.append(f"    the environment says: {facts}")
    return lines


def spoken(message: Mapping[str, Any]) -> str:
    """A message as text, with its thinking and its calls."""
    role, text = message["role"], str(message.get("raw") or message.get("content") or "")
    if "raw" not in message and (thought := message.get("reasoning_content")):
        text = f"<think>{thought}</think>{text}"
    if role == "tool":
        role = f"tool {message.get('name', '')}".rstrip()
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = [
        f"[call {call['name']}] {json.dumps(call['arguments'], ensure_ascii=False)}"
        for call in calls
    ]
    return "\n".join([*([f"[{role}] {text}"] if text or not said else []), *said])
