"""What a run looks like in a terminal: a live panel, or plain lines where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, Self, TextIO

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from keel.trainer.run.progress import DISPLAY, Wait, duration
from keel.trainer.run.signals import outliving, print_line

SHOWN = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "nll", "{:.4f} nats"),
    ("epochs", "sft/epochs", "{:.2f}"),
    ("KL to reference", "kl/ref", "{:.2e}"),
    ("mismatch |Δ log p|", "mismatch/logp_abs", "{:.1e}"),
    ("largest ratio", "mismatch/ratio_max", "{:.3f}"),
    ("sampling mask", "sampling/kept_mean", "{:.1f} ids"),
    ("routing overlap", "routing/overlap", "{:.4f}"),
    ("sequences masked", "mask/sequence_fraction", "{:.2%}"),
    ("steps behind", "staleness/mean", "{:.2f}"),
    ("entropy", "entropy/kept", "{:.3f}"),
    ("gradient norm", "grad_norm", "{:.3f}"),
    ("completion length", "length/mean", "{:.1f}"),
    ("tokens per second", "throughput/tokens_per_second", "{:,.0f}"),
)
LINE = (
    ("reward", "reward/mean", "{:.3f}"),
    ("loss", "nll", "{:.4f}"),
    ("epochs", "sft/epochs", "{:.2f}"),
    ("KL", "kl/ref", "{:.1e}"),
    ("mismatch", "mismatch/logp_abs", "{:.0e}"),
    ("grad", "grad_norm", "{:.2f}"),
    ("length", "length/mean", "{:.0f}"),
    ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
)
"""Figures of a plain step line, which has about 120 characters; metrics.jsonl has all."""
ERRORS, UNIFORM = "reward/error", "rollout/uniform_group_fraction"
SPLIT = (("sampling", "rollout"), ("reward", "reward"), ("training", "train"), ("weights", "sync"))
BARS = " ▁▂▃▄▅▆▇█"
STEP = "time/step"
ECHO = 4
"""Columns of two `^C`."""


class View(Protocol):
    def begin(self, activity: str) -> None: ...
    def reach(self, done: int, total: int, unit: str) -> None:
        """So much of what has begun last is done."""
        ...

    def record(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def say(self, text: str) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...


def open_view(title: str, steps: int, stream: TextIO | None = None) -> View:
    """The live panel on a terminal, plain lines elsewhere (pipes, CI, `ray job submit`).

    stream: None: standard output as it is now, which need not be what it was at the import.
    """
    chosen = stream or sys.stdout
    return LiveView(title, steps) if chosen.isatty() else PlainView(steps, chosen)


class Progress:
    """Time left, judged by the steps done since this process began."""

    def __init__(self, steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._steps, self._clock = steps, clock
        self._first: tuple[int, float] | None = None

    def left(self, step: int) -> float | None:
        """Seconds left, or None before two steps have been seen."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
            return None
        first, began = self._first
        return (now - began) / (step - first) * (self._steps - step) if step > first else None


class Now:
    """What a run is doing; how long it may take is judged by the last time it did the same."""

    def __init__(self) -> None:
        self.wait = Wait("starting", quiet=True)
        self._took: dict[str, float] = {}

    def begin(self, activity: str) -> None:
        self._took[self.wait.what] = self.wait.seconds
        # An evaluation may take longer than many steps, so plain lines mention it at once.
        quiet = activity != "evaluating"
        self.wait = Wait(activity, last_s=self._took.get(activity), quiet=quiet)

    def reach(self, done: int, total: int, unit: str) -> None:
        self.wait.unit, self.wait.done, self.wait.total = unit, done, total


class PlainView:
    """One line a step, and one every half a minute about what takes longer."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps, self._stream = steps, stream or sys.stdout
        self._progress, self._now = Progress(steps), Now()

    def begin(self, activity: str) -> None:
        DISPLAY.end(self._now.wait)
        self._now.begin(activity)
        DISPLAY.begin(self._now.wait)

    def reach(self, done: int, total: int, unit: str) -> None:
        self._now.reach(done, total, unit)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        line = [f"step {step}/{self._steps}", *troubles(numbers)]
        line += [f"{name} {value:.3f}" for name, value in held_out(numbers).items()]
        line += [
            f"{label} {form.format(numbers[key])}" for label, key, form in LINE if key in numbers
        ]
        line += [f"{numbers[STEP]:.1f} s"] if STEP in numbers else []
        if left := self._progress.left(step):
            line.append(f"{duration(left)} left")
        self.say("  ".join(line))

    def say(self, text: str) -> None:
        print_line(text, self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        DISPLAY.end(self._now.wait)


class LiveView:
    """A panel that redraws itself: progress, curves, signs of health, the time split."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        self._title, self._steps = title, steps
        self._progress = Progress(steps)
        self._step, self._left = 0, None
        self._now = Now()
        self._numbers: dict[str, float] = {}
        self._rewards: list[float] = []
        self._evals: dict[str, list[tuple[int, float]]] = {}
        self._console = console or Console(file=outliving(sys.stdout))
        self._live = Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=4,
        )

    def begin(self, activity: str) -> None:
        self._now.begin(activity)

    def reach(self, done: int, total: int, unit: str) -> None:
        self._now.reach(done, total, unit)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step, self._left = step, self._progress.left(step)
        self._numbers |= numbers
        if "reward/mean" in numbers:
            self._rewards.append(numbers["reward/mean"])
        for name, value in held_out(numbers).items():
            self._evals.setdefault(name.removeprefix("eval/"), []).append((step, value))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *raised: object) -> None:
        # The panel stays as a summary of a run that has got somewhere.
        self._live.transient = self._step == 0 or any(raised)
        self._live.stop()

    def _draw(self) -> RenderableType:
        left = f"{duration(self._left)} left" if self._left else ""
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(width=14)
        head.add_column(ratio=1)
        head.add_column(justify="right", width=14)
        bar = ProgressBar(total=self._steps, completed=self._step)
        head.add_row(f"step {self._step}/{self._steps}", bar, left)
        now = Spinner("dots", Text(self._now.wait.words(), style="dim"))
        body = Table.grid(expand=True, padding=(0, 2))
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(self._health(), self._curves())
        # A terminal echoes ^C behind the last border. Were there no room, that would begin a line
        # which the next redrawing does not know of.
        width = max(20, self._console.width - ECHO)
        content = Group(head, now, Text(), body)
        return Panel(content, title=self._title, border_style="cyan", width=width)

    def _health(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        for label, key, form in SHOWN:
            if key in self._numbers:
                table.add_row(label, form.format(self._numbers[key]))
        for trouble in troubles(self._numbers):
            table.add_row(Text(trouble, style="bold yellow"))
        return table

    def _curves(self) -> RenderableType:
        rows: list[RenderableType] = []
        if self._rewards:
            rows += [Text("reward", style="dim"), Text(sparkline(self._rewards), style="green")]
        for name, points in self._evals.items():
            path = "  ".join(f"{value:.3f} (step {step})" for step, value in points[-4:])
            rows += [Text(f"held-out {name}", style="dim"), Text(path, style="bold")]
        times = {label: self._numbers.get(f"time/{key}", 0.0) for label, key in SPLIT}
        if total := sum(times.values()):
            split = "  ".join(f"{label} {spent / total:.0%}" for label, spent in times.items())
            rows += [Text(f"time split of {total:.1f} s a step", style="dim"), Text(split)]
        return Group(*rows)


def held_out(numbers: Mapping[str, float]) -> dict[str, float]:
    """What a step shows of its evaluation: pass@1 or the loss, and how many completions had no
    score."""
    return {
        name: value
        for name, value in numbers.items()
        if name.startswith("eval/")
        and (name.endswith(("/pass@1", "/loss")) or (name.endswith("/unscored") and value > 0))
    }


def troubles(numbers: Mapping[str, float]) -> list[str]:
    """Failed rewards, and a step in which all rewards of each group are equal."""
    notes: list[str] = []
    if (share := numbers.get(ERRORS, 0.0)) > 0:
        notes.append(f"reward errors {share:.1%}")
    if numbers.get(UNIFORM) == 1.0:
        notes.append("no group differs")
    return notes


def sparkline(series: list[float], width: int = 40) -> str:
    """The series as a row of bars, averaged into at most `width` of them."""
    per_bar = max(1, -(-len(series) // width))
    means = [
        sum(chunk) / len(chunk)
        for chunk in (series[i : i + per_bar] for i in range(0, len(series), per_bar))
    ]
    low, high = min(means), max(means)
    span = (high - low) or 1.0
    bars = "".join(BARS[1 + round((value - low) / span * (len(BARS) - 2))] for value in means)
    return f"{bars} {low:.2f}…{high:.2f}"
