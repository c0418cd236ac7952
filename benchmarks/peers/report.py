"""The arithmetic of the comparison, and its tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Literal

Status = Literal["done", "cut short", "failed", "skipped"]
BASE, OURS = "trl", "keel"
KNOBS = "knobs of all arms of Keel"
GOALS = (2.2, 0.40)
"""Speed of an arm of `OURS` relative to `BASE` at least, and its peak memory at most."""


@dataclass(frozen=True, kw_only=True)
class ArmRun:
    """One process of an arm, as it was measured."""

    arm: str
    run: int
    """Its place in the order of arms, from 1."""
    status: Status
    wall_s: float = 0.0
    """From its start to its end."""
    start_s: float = 0.0
    """Until the first step began."""
    peak_gib: float = 0.0
    """Of the whole GPU (without one: of its processes), over what was in use before."""
    why: str = ""
    """What was wrong, where it is not done."""
    steps: Sequence[Mapping[str, Any]] = ()
    """Measured steps, warm-up left out: see `workload.StepTimes`."""
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Settings, versions and memory by process, as the arm wrote them."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def earlier(out: Path) -> list[ArmRun]:
    """The runs that a folder has already."""
    path = out / "results.json"
    return [ArmRun(**run) for run in json.loads(path.read_text())["runs"]] if path.exists() else []


def check_same(out: Path, facts: Mapping[str, str]) -> None:
    """Runs of another commit, machine or workload, or of other knobs, have no median with these:
    SystemExit."""
    before = json.loads((out / "results.json").read_text())["facts"]
    for name in ("machine", "commit", "model", "a step", KNOBS):
        if (was := before.get(name)) != facts[name]:
            raise SystemExit(
                f"{out} has runs where {name}: {was!r}, now {facts[name]!r}: give them another "
                "--out"
            )


@dataclass(frozen=True, kw_only=True)
class Summary:
    """All runs of one arm."""

    arm: str
    runs: int
    steps: int
    step_s: float
    """Median seconds of a step."""
    tokens_s: float
    """Median over steps of sampled tokens per second, end to end."""
    slowest: float
    fastest: float
    """Of `tokens_s`, over single steps."""
    peak_gib: float
    """Largest of its runs."""
    phases: Mapping[str, float]
    """Median seconds; `rest` is what the phases do not cover."""
    notes: Mapping[str, float]
    """Median of what the arm said about its steps."""


def summarize(runs: Sequence[ArmRun]) -> dict[str, Summary]:
    """Arm → all its runs, in the order of first appearance. Arms without a step are left out."""
    summaries: dict[str, Summary] = {}
    for arm in dict.fromkeys(run.arm for run in runs):
        mine = [run for run in runs if run.arm == arm and run.steps]
        steps = [step for run in mine for step in run.steps]
        if not steps:
            continue
        speeds = [step["tokens"] / step["seconds"] for step in steps]
        names = dict.fromkeys(name for step in steps for name in step["phases"])
        phases = {name: median(step["phases"].get(name, 0.0) for step in steps) for name in names}
        phases["rest"] = median(step["seconds"] - sum(step["phases"].values()) for step in steps)
        noted = dict.fromkeys(name for step in steps for name in step["notes"])
        summaries[arm] = Summary(
            arm=arm,
            runs=len(mine),
            steps=len(steps),
            step_s=median(step["seconds"] for step in steps),
            tokens_s=median(speeds),
            slowest=min(speeds),
            fastest=max(speeds),
            peak_gib=max(run.peak_gib for run in mine),
            phases=phases,
            notes={
                name: median(step["notes"][name] for step in steps if name in step["notes"])
                for name in noted
            },
        )
    return summaries


def whole(runs: Sequence[ArmRun]) -> list[ArmRun]:
    """Those that count in a verdict: one that was cut short or failed may have had its worst, or
    the most memory, before it."""
    return [run for run in runs if run.status == "done"]


def best_peer(summaries: Mapping[str, Summary]) -> Summary | None:
    """Of the arms of `BASE`, the fastest."""
    peers = [each for name, each in summaries.items() if name.startswith(BASE)]
    return max(peers, key=lambda each: each.tokens_s, default=None)


def allowed_gib(runs: Sequence[ArmRun]) -> float:
    """The goal's share of the fastest peer's memory; 0 before one has run."""
    peer = best_peer(summarize(whole(runs)))
    return round(GOALS[1] * peer.peak_gib, 1) if peer else 0.0


def result_lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Speed and memory of each arm, and both relative to arms of the peers."""
    peers = [name for name in (BASE, "trl-lean", "verl") if name in summaries]
    yield (
        "| arm | runs, steps | s per step | tokens per second | slowest … fastest step | peak GiB |"
        + "".join(f" speed ÷ {name} | memory ÷ {name} |" for name in peers)
    )
    yield "|---" * (6 + 2 * len(peers)) + "|"
    for each in summaries.values():
        row = (
            f"| {each.arm} | {each.runs}, {each.steps} | {each.step_s:.2f} | {each.tokens_s:,.0f} "
            f"| {each.slowest:,.0f} … {each.fastest:,.0f} | {each.peak_gib:.1f} |"
        )
        for name in peers:
            peer = summaries[name]
            share = each.peak_gib / peer.peak_gib if peer.peak_gib else 0.0
            row += f" {each.tokens_s / peer.tokens_s:.2f} | {share:.0%} |"
        yield row


def phase_lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    """Where the time of a step goes: median seconds."""
    names = dict.fromkeys(name for each in summaries.values() for name in each.phases)
    ordered = [*(name for name in names if name != "rest"), "rest"]
    yield "| arm | " + " | ".join(ordered) + " | step |"
    yield "|---" * (len(ordered) + 2) + "|"
    for each in summaries.values():
        cells = [f"{each.phases[name]:.2f}" if name in each.phases else "" for name in ordered]
        yield f"| {each.arm} | " + " | ".join(cells) + f" | {each.step_s:.2f} |"


SHOWN = (
    "sampling/kept_mean",
    "mismatch/logp_abs",
    "mismatch/ratio_max",
    "staleness/mean",
    "reward/mean",
    "reward",
    "kl",
    "kl/ref",
    "shortest completion",
    "critic/score/mean",
    "actor/kl_loss",
    "training/rollout_probs_diff_mean",
    "response_length/min",
    "sampling/sampling_logp_difference/mean",
    "sampling/importance_sampling_ratio/mean",
)


def note_lines(summaries: Mapping[str, Summary]) -> Iterator[str]:
    for each in summaries.values():
        said = [f"{name} {each.notes[name]:.4g}" for name in SHOWN if name in each.notes]
        yield f"- {each.arm}: {', '.join(said)}"


def verdict(summaries: Mapping[str, Summary]) -> str:
    """Of our fastest arm among those that fit the memory, or of all if none does; beside the
    peer's fastest."""
    base = best_peer(summaries)
    arms = [arm for arm in summaries if arm.startswith(OURS)]
    if base is None or not arms:
        return f"no verdict: an arm of {BASE} and one of {OURS} have not both run to their end"

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


DIFFERENCES = """\
- Same for all arms (what verl lacks: below): model files, prompts, group size, lengths,
  temperature, top-p and top-k, reward, learning rate, AdamW's betas, no weight decay, gradient
  clipping, ratio clipping, β with a reference policy in bfloat16, unbiased KL, off-policy
  sequence mask, no scaling of advantages, mean over sequences of the mean over tokens. Engine:
  one version of vLLM, bfloat16, CUDA graphs.
- Weights: `trl` trains bfloat16 weights with bfloat16 gradients and optimizer state, 8 bytes a
  parameter: the least that TRL can do with, and too coarse for this learning rate. Keel trains
  float32 master weights with float32 gradients and optimizer state and computes in bfloat16, 18
  bytes a parameter. `trl-master` has float32 weights and bfloat16 autocast.
- Loss: Keel scores each token over the set it was sampled from, with the engine's probability as
  π_old. TRL scores over the whole vocabulary, with the trainer's probability as π_old, and weights
  each sequence by the ratio to the engine's, which takes a forward pass more (`trl-fast`: without).
  So the two losses have other values.
- Processes: TRL has vLLM in the trainer's process and makes text of each token as it comes. Keel
  has an engine and a trainer in two processes, each with a CUDA context, scores completions as they
  finish, and lets the engine read new weights where they are on the GPU (CUDA IPC).
- Order: TRL samples, then trains. So does `keel`; `keel-async` samples the next batch meanwhile
  (`algorithm.max_lag: 1`), from weights one step older. TRL's GRPOTrainer has no such mode.
- Memory: `trl` has its default engine share of 0.3, whatever its completions need, and keeps all
  activations (by default TRL recomputes them); attention is transformers' default; `trl-fit` has
  Liger's kernels and an engine of the size that its completions need; `trl-lean` has
  gradient checkpointing, a smaller micro-batch and engine share, and vLLM's sleep mode
  (`trl-lean-awake`: without sleep). `keel` checkpoints activations, with the same engine
  share as `trl-lean`; its engine does not sleep. `keel-fast` keeps all activations, `keel-lean` has
  the optimizer in host memory.
- verl: an engine of its own version of vLLM, float32 weights, gradients and optimizer state as
  Keel's, the reference policy in host memory, `low_var_kl` instead of the unbiased KL, no mask of
  off-policy sequences. `verl` checkpoints activations, `verl-fast` keeps them, does not ask the
  engine for log-probabilities and sees sooner than after two seconds that all completions are
  there, `verl-liger` has Liger's kernels besides, `verl-fit` is that one with an engine of the size
  that its completions need, `verl-plain` and `verl-fast-plain` do not fuse the head with the loss.
  flash-attn's kernels are torch's build."""


def report(runs: Sequence[ArmRun], facts: Mapping[str, Any], *, judge: bool = True) -> str:
    """Everything, as Markdown. `facts`: machine, versions and workload by name; `judge`: whether
    the figures are of a kind that the goal is about."""
    summaries = summarize(runs)
    lines = [
        "# Keel and its peers on one GPU",
        "",
        *(f"- {name}: {value}" for name, value in facts.items()),
        "",
        *result_lines(summaries),
        "",
        verdict(summarize(whole(runs)))
        if judge
        else "No GPU: these figures say that it runs, nothing more.",
        "",
        "Median seconds of a step, by what they went into:",
        "",
        *phase_lines(summaries),
        "",
        "Medians of what the arms say of themselves:",
        "",
        *note_lines(summaries),
        "",
        "What differs:",
        "",
        DIFFERENCES,
        "",
        "Order of the runs:",
        "",
        *(
            f"{run.run}. {run.arm}: {run.status}, {run.wall_s:.0f} s of which {run.start_s:.0f} s "
            f"start, peak {run.peak_gib:.1f} GiB{f' ({run.why})' if run.why else ''}"
            for run in runs
        ),
    ]
    return "\n".join(lines) + "\n"
