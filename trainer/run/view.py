"""Terminal output of a run: a live panel, or plain lines if there is no terminal."""

import sys
import time
from collections.abc import Mapping
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from keel.trainer.run.progress import DISPLAY, Wait, format_duration
from keel.trainer.run.signals import keep_writable, print_line

_METRICS = (
    ("reward/mean", "reward", "{:.3f}", "reward {:.3f}"),
    ("nll", "loss", "{:.4f} nats", "loss {:.4f}"),
    ("sft/epochs", "epochs", "{:.2f}", "epochs {:.2f}"),
    ("kl/ref", "KL to reference", "{:.2e}", "KL {:.1e}"),
    ("mismatch/logp_abs", "mismatch |Δ log p|", "{:.1e}", "mismatch {:.0e}"),
    ("mismatch/ratio_max", "largest ratio", "{:.3f}", ""),
    ("sampling/kept_mean", "sampling mask", "{:.1f} ids", ""),
    ("routing/overlap", "routing overlap", "{:.4f}", ""),
    ("selection/overlap", "selection overlap", "{:.4f}", ""),
    ("mask/sequence_fraction", "sequences masked", "{:.2%}", ""),
    ("staleness/mean", "steps behind", "{:.2f}", ""),
    ("entropy/kept", "entropy", "{:.3f}", ""),
    ("grad_norm", "gradient norm", "{:.3f}", "grad {:.2f}"),
    ("length/mean", "completion length", "{:.1f}", "length {:.0f}"),
    ("throughput/tokens_per_second", "tokens per second", "{:,.0f}", "tokens/s {:,.0f}"),
)
"""The metrics to show, each with its label and format in the panel and its text in a plain line."""
_TIMES = (("sampling", "rollout"), ("reward", "reward"), ("training", "train"), ("weights", "sync"))
_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 40
_ECHO = 4  # the number of columns that two echoed `^C` take up


class View:
    """Prints a line per step, plus a line every 30 seconds during longer activities."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._wait = Wait("starting", quiet=True)
        self._first: tuple[int, float] | None = None

    def begin(self, activity: str) -> None:
        DISPLAY.end(self._wait)
        # An evaluation may take longer than many steps, so plain lines mention it at once.
        self._wait = Wait(activity, quiet=activity != "evaluating")
        DISPLAY.begin(self._wait)

    def show_progress(self, done: int, total: int, unit: str) -> None:
        self._wait.unit, self._wait.done, self._wait.total = unit, done, total

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        line = [f"step {step}/{self._steps}", *_list_problems(numbers)]
        line += [f"{name} {value:.3f}" for name, value in _held_out(numbers).items()]
        line += [text.format(numbers[key]) for key, *_, text in _METRICS if text and key in numbers]
        line += [f"{numbers['time/step']:.1f} s"] if "time/step" in numbers else []
        line += [left] if (left := self._time_left(step)) else []
        self.say("  ".join(line))

    def say(self, text: str) -> None:
        print_line(text)

    def _time_left(self, step: int) -> str:
        now = time.monotonic()
        first, began = self._first = self._first or (step, now)
        left = (now - began) / max(step - first, 1) * (self._steps - step)
        return f"{format_duration(left)} left" if left else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        DISPLAY.end(self._wait)


class _LiveView(View):
    """Shows a panel with progress, curves, health metrics and a breakdown of where the time
    goes."""

    def __init__(self, title: str, steps: int, console: Console | None = None) -> None:
        super().__init__(steps)
        self._title, self._step, self._left = title, 0, ""
        self._numbers: dict[str, float] = {}
        self._rewards: list[float] = []
        self._evals: dict[str, list[tuple[int, float]]] = {}
        self._console = console or Console(file=keep_writable(sys.stdout))
        self._live = Live(console=self._console, get_renderable=self._draw, refresh_per_second=4)

    def begin(self, activity: str) -> None:
        self._wait = Wait(activity)

    def record(self, step: int, numbers: Mapping[str, float]) -> None:
        self._step, self._left = step, self._time_left(step)
        self._numbers |= numbers
        if "reward/mean" in numbers:
            self._rewards.append(numbers["reward/mean"])
        for name, value in _held_out(numbers).items():
            self._evals.setdefault(name.removeprefix("eval/"), []).append((step, value))

    def say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        # The panel stays as a summary if at least one step is done.
        self._live.transient = self._step == 0 or any(error)
        self._live.stop()

    def _draw(self) -> RenderableType:
        head = Table.grid(expand=True, padding=(0, 1))
        head.add_column(width=14)
        head.add_column(ratio=1)
        head.add_column(justify="right", width=14)
        bar = ProgressBar(total=self._steps, completed=self._step)
        head.add_row(f"step {self._step}/{self._steps}", bar, self._left)
        body = Table.grid(expand=True, padding=(0, 2))
        body.add_column(ratio=1)
        body.add_column(ratio=1)
        body.add_row(self._health(), self._curves())
        now = Spinner("dots", Text(self._wait.text(), style="dim"))
        # Leave room for the terminal's echo of ^C, which would otherwise break the redraw.
        width = max(20, self._console.width - _ECHO)
        content = Group(head, now, Text(), body)
        return Panel(content, title=self._title, border_style="cyan", width=width)

    def _health(self) -> Table:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="dim")
        table.add_column(justify="right")
        for key, label, form, _ in _METRICS:
            if key in self._numbers:
                table.add_row(label, form.format(self._numbers[key]))
        for trouble in _list_problems(self._numbers):
            table.add_row(Text(trouble, style="bold yellow"))
        return table

    def _curves(self) -> RenderableType:
        rows: list[RenderableType] = []
        if self._rewards:
            rows += [Text("reward", style="dim"), Text(_sparkline(self._rewards), style="green")]
        for name, points in self._evals.items():
            path = "  ".join(f"{value:.3f} (step {step})" for step, value in points[-4:])
            rows += [Text(f"held-out {name}", style="dim"), Text(path, style="bold")]
        times = {label: self._numbers.get(f"time/{key}", 0.0) for label, key in _TIMES}
        if total := sum(times.values()):
            split = "  ".join(f"{label} {spent / total:.0%}" for label, spent in times.items())
            rows += [Text(f"time split of {total:.1f} s a step", style="dim"), Text(split)]
        return Group(*rows)


def open_view(title: str, steps: int) -> View:
    """Return a live panel if the output is a terminal, or else a view that prints plain lines."""
    return _LiveView(title, steps) if sys.stdout.isatty() else View(steps)


def _held_out(numbers: Mapping[str, float]) -> dict[str, float]:
    return {
        name: value
        for name, value in numbers.items()
        if name.startswith("eval/")
        and (name.endswith(("/pass@1", "/loss")) or (name.endswith("/unscored") and value > 0))
    }


def _list_problems(numbers: Mapping[str, float]) -> list[str]:
    notes: list[str] = []
    if (share := numbers.get("reward/error", 0.0)) > 0:
        notes.append(f"reward errors {share:.1%}")
    if numbers.get("rollout/uniform_group_fraction") == 1.0 and not numbers.get("grad_norm"):
        notes.append("no group differs")
    return notes


def _sparkline(series: list[float]) -> str:
    size = max(1, -(-len(series) // _CURVE_WIDTH))
    chunks = [series[i : i + size] for i in range(0, len(series), size)]
    means = [sum(chunk) / len(chunk) for chunk in chunks]
    low, high = min(means), max(means)
    top = len(_BARS) - 1
    bars = "".join(_BARS[round((value - low) / ((high - low) or 1.0) * top)] for value in means)
    return f"{bars} {low:.2f}…{high:.2f}"
