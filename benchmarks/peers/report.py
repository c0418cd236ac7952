"""Summaries, tables and verdicts of the comparison."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Literal

Status = Literal["done", "cut short", "failed", "skipped"]
BASE, OURS = "trl", "keel"
KNOBS, WORK = "knobs of all arms of Keel", "workload"
GOALS = (2.2, 0.40)
"""Minimum speed of an arm of `OURS` relative to `BASE`, and maximum relative peak memory."""
MIN_DRAWS = 4
"""Minimum number of workloads for a verdict over draws."""


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """Measurements of one arm process."""

    arm: str
    run: int
    status: Status
    wall_s: float = 0.0
    start_s: float = 0.0
    """Seconds until the first step."""
    peak_gib: float = 0.0
    """Peak memory of the GPU (without one: of the processes) above the memory in use before."""
    why: str = ""
    """Reason for any status except done."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Measured steps; see `workload.StepTimes`."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings and versions written by the arm."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def earlier(out: Path) -> list[ArmRun]:
    """Load the runs of a result folder."""
    path = out / "results.json"
    return [ArmRun(**run) for run in json.loads(path.read_text())["runs"]] if path.exists() else []


def check_same(out: Path, facts: Mapping[str, str]) -> None:
    """Raise SystemExit if the folder has runs with another commit, machine, workload or knobs."""
    before = json.loads((out / "results.json").read_text())["facts"]
    for name in ("machine", "commit", WORK, KNOBS):
        if (was := before.get(name)) != facts[name]:
            raise SystemExit(
                f"--out {out} has runs with another {name}: {was!r} instead of {facts[name]!r}; "
                "choose another folder"
            )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Medians over all runs of an arm."""

    arm: str
    runs: int
    steps: int
    step_s: float
    tokens_s: float
    """Sampled tokens per second, end to end."""
    peak_gib: float
    """Maximum over runs."""
    phases: Mapping[str, float]
    """Seconds by phase; `rest` is the time outside all phases."""


def summarize(runs: Sequence[ArmRun]) -> dict[str, Summary]:
    """Map each arm with steps to its summary, in order of first appearance."""
    summaries: dict[str, Summary] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm and run.steps]
        steps = [step for run in mine for step in run.steps]
        if not steps:
            continue
        names = dict.fromkeys(name for step in steps for name in step["phases"])
        phases = {name: median(step["phases"].get(name, 0.0) for step in steps) for name in names}
        phases["rest"] = median(step["seconds"] - sum(step["phases"].values()) for step in steps)
        summaries[arm] = Summary(
            arm=arm,
            runs=len(mine),
            steps=len(steps),
            step_s=median(step["seconds"] for step in steps),
            tokens_s=median(step["tokens"] / step["seconds"] for step in steps),
            peak_gib=max(run.peak_gib for run in mine),
            phases=phases,
        )
    return summaries


def whole(runs: Sequence[ArmRun]) -> list[ArmRun]:
    """Return the complete runs; others may have missed their peak."""
    return [run for run in runs if run.status == "done"]


def best_peer(summaries: Mapping[str, Summary]) -> Summary | None:
    peers = [each for name, each in summaries.items() if name.startswith(BASE)]
    return max(peers, key=lambda each: each.tokens_s, default=None)


def allowed_gib(runs: Sequence[ArmRun]) -> float:
    """Return the memory limit relative to the fastest peer, or 0 before a peer has run."""
    peer = best_peer(summarize(whole(runs)))
    return round(GOALS[1] * peer.peak_gib, 1) if peer else 0.0


def result_lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Yield a table of speed and memory, also relative to the peers' main arms."""
    peers = [name for name in (BASE, "trl-fit", "verl") if name in summaries]
    yield (
        "| arm | runs, steps | s per step | tokens per second | peak GiB |"
        + "".join(f" speed ÷ {name} | memory ÷ {name} |" for name in peers)
    )
    yield "|---" * (5 + 2 * len(peers)) + "|"
    for each in summaries.values():
        row = (
            f"| {each.arm} | {each.runs}, {each.steps} | {each.step_s:.2f} | {each.tokens_s:,.0f} "
            f"| {each.peak_gib:.1f} |"
        )
        for name in peers:
            peer = summaries[name]
            share = each.peak_gib / peer.peak_gib if peer.peak_gib else 0.0
            row += f" {each.tokens_s / peer.tokens_s:.2f} | {share:.0%} |"
        yield row


def phase_lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Yield a table of the seconds per step by phase."""
    names = dict.fromkeys(name for each in summaries.values() for name in each.phases)
    ordered = [*(name for name in names if name != "rest"), "rest"]
    yield "| arm | " + " | ".join(ordered) + " | step |"
    yield "|---" * (len(ordered) + 2) + "|"
    for each in summaries.values():
        cells = [f"{each.phases[name]:.2f}" if name in each.phases else "" for name in ordered]
        yield f"| {each.arm} | " + " | ".join(cells) + f" | {each.step_s:.2f} |"


def verdict(summaries: Mapping[str, Summary]) -> str:
    """Compare the best peer with our fastest arm within the memory goal, or else our fastest."""
    base = best_peer(summaries)
    arms = [arm for arm in summaries if arm.startswith(OURS)]
    if base is None or not arms:
        return f"no verdict: it needs a complete arm of {BASE} and one of {OURS}"

    def memory_of(arm: str) -> float:
        return summaries[arm].peak_gib / base.peak_gib if base.peak_gib else 0.0

    fitting = [arm for arm in arms if memory_of(arm) <= GOALS[1]]
    best = max(fitting or arms, key=lambda arm: summaries[arm].tokens_s)
    speed, memory = summaries[best].tokens_s / base.tokens_s, memory_of(best)
    met = speed >= GOALS[0] and memory <= GOALS[1]
    return (
        f"{best} has {speed:.2f} times the tokens per second of {base.arm} in {memory:.0%} of its "
        f"peak memory: the goal ({GOALS[0]:g} times, {GOALS[1]:.0%}) is "
        + ("met" if met else "NOT met")
    )


def report(runs: Sequence[ArmRun], facts: Mapping[str, Any], *, judge: bool = True) -> str:
    """Format everything as Markdown.

    facts: machine, versions and workload by name. judge: add a verdict.
    """
    summaries = summarize(runs)
    lines = [
        "# Keel and its peers on one GPU",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        *result_lines(summaries),
        "",
        verdict(summarize(whole(runs))) if judge else "No GPU: smoke test only.",
        "",
        "Median seconds of a step by phase:",
        "",
        *phase_lines(summaries),
        "",
        "Order of the runs:",
        "",
        *(
            f"{run.run}. {run.arm}: {run.status}, {run.wall_s:.0f} s including {run.start_s:.0f} s "
            f"of start-up, peak {run.peak_gib:.1f} GiB{f' ({run.why})' if run.why else ''}"
            for run in runs
        ),
    ]
    return "\n".join(lines) + "\n"


def judge_draws(folders: Sequence[Path], arm: str) -> str:
    """Format the results of `compare --draw` in several folders and their verdict."""
    lines = ["| draw | tokens per second | peer's | speed ÷ peer | memory ÷ peer | start s |"]
    lines.append("|---" * 6 + "|")
    ratios: list[tuple[float, float]] = []
    for folder in folders:
        runs = whole(earlier(folder))
        summaries = summarize(runs)
        ours, peer = summaries.get(arm), best_peer(summaries)
        if ours is None or peer is None:
            lines.append(f"| {folder.name}: no complete arms of {arm} and {BASE} |")
            continue
        ratios.append((ours.tokens_s / peer.tokens_s, ours.peak_gib / peer.peak_gib))
        speed, memory = ratios[-1]
        starts = {run.arm: run.start_s for run in runs if run.steps}
        lines.append(
            f"| {folder.name} | {ours.tokens_s:,.0f} | {peer.tokens_s:,.0f} ({peer.arm}) "
            f"| {speed:.2f} | {memory:.0%} | {starts[arm]:.0f}, {starts[peer.arm]:.0f} |"
        )
    needed = max(MIN_DRAWS, len(folders))
    if len(ratios) < needed:
        return "\n".join([*lines, f"no verdict: {len(ratios)} draws of {needed}"])
    speeds, memories = zip(*ratios, strict=True)
    met = sum(speed >= GOALS[0] and memory <= GOALS[1] for speed, memory in ratios)
    lines.append(
        f"{geometric_mean(speeds):.2f} times the speed in {geometric_mean(memories):.0%} of the "
        f"memory (geometric means); the goal ({GOALS[0]:g} times, {GOALS[1]:.0%}) is met in {met} "
        f"of {len(ratios)} draws"
    )
    return "\n".join(lines)
