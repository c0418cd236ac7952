"""One run of an engine under the clock, and where its time and its host memory go."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.rollout.drivers import Driver, Steps
from benchmarks.rollout.model import Size, make_prompts
from keel.rl.types import Group

TRACED_STEPS = 20


def timed_run(driver: Driver, steps: Steps, size: Size, salt: str) -> dict[str, Any]:
    """One batch of everything, from the first request to the last group."""
    prompts = make_prompts(size, salt)
    steps.reset()
    cpu, threads = driver.on_thread(time.thread_time), thread_seconds()
    began = time.perf_counter()
    groups = driver.run(prompts, size.completion)
    seconds = time.perf_counter() - began
    cpu = driver.on_thread(time.thread_time) - cpu
    spent = {
        name: value - threads.get(name, 0.0)
        for name, value in thread_seconds().items()
        if value - threads.get(name, 0.0) > 0.02 * seconds
    }
    return {
        "seconds": seconds,
        "tokens_per_second": size.tokens / seconds,
        "steps": steps.count,
        "ms_per_token_row": 1e3 * seconds / size.completion,
        "thread_ms_per_step": 1e3 * cpu / max(1, steps.count),
        "parts_ms_per_step": {
            part: 1e3 * value / max(1, steps.count) for part, value in steps.parts.items()
        },
        "busy_threads": dict(sorted(spent.items(), key=lambda item: -item[1])[:6]),
        **(host_bytes(groups) if groups else {}),
    }


def host_bytes(groups: list[Group]) -> dict[str, Any]:
    """Of the returned arrays, per token of prompt and completion, and the mean sampling mask."""
    total: dict[str, int] = {}
    tokens = sampled = kept = 0
    for group in groups:
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                arrays: dict[str, np.ndarray | None] = {
                    "ids": segment.token_ids_T,
                    "trainable": segment.trainable_T,
                    "logp": segment.logp_old_T,
                    "version": segment.version_T,
                    "routes": segment.routes_TLK,
                    "kept ids": None if segment.kept is None else segment.kept.ids,
                    "kept offsets": None if segment.kept is None else segment.kept.offsets,
                }
                for name, array in arrays.items():
                    if array is not None:
                        total[name] = total.get(name, 0) + array.nbytes
                tokens += len(segment.token_ids_T)
                sampled += int(segment.trainable_T.sum())
                kept += 0 if segment.kept is None else len(segment.kept.ids)
    return {
        "host_bytes_per_token": {name: value / tokens for name, value in total.items()},
        "host_bytes_per_token_sum": sum(total.values()) / tokens,
        "mean_kept": kept / sampled,
    }


def thread_seconds() -> dict[str, float]:
    """CPU time of every thread of this process and its children."""
    import psutil  # noqa: PLC0415

    seconds: dict[str, float] = {}
    here = psutil.Process()
    for process in (here, *here.children(recursive=True)):
        with suppress(psutil.Error, OSError):
            for thread in process.threads():
                name = Path(f"/proc/{process.pid}/task/{thread.id}/comm").read_text().strip()
                kind = "main" if process.pid == here.pid else "child"
                key = f"{kind} {process.pid} {name} {thread.id}"
                seconds[key] = thread.user_time + thread.system_time
    return seconds


def profile(driver: Driver, steps: Steps, size: Size, out: Path, name: str) -> dict[str, Any]:
    """The 40 functions with most time of their own, and what the GPU did in 20 steps."""
    result: dict[str, Any] = {}
    steps.reset()
    profiler = cProfile.Profile()
    driver.on_thread(profiler.enable)
    began = time.perf_counter()
    driver.run(make_prompts(size, "cprofile"), size.completion)
    result["profiled_ms_per_token_row"] = 1e3 * (time.perf_counter() - began) / size.completion
    driver.on_thread(profiler.disable)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).strip_dirs()
    stats.sort_stats("tottime").print_stats(40)
    stats.sort_stats("cumtime").print_stats(60)
    (out / f"profile_{name}.txt").write_text(text.getvalue())
    if torch.cuda.is_available():
        steps.reset()
        result["gpu"] = trace(driver, steps, size)
    return result


def trace(driver: Driver, steps: Steps, size: Size) -> dict[str, Any]:
    """Share of the time in which the GPU had work, and its longest kernels."""
    tracer = torch_profile(activities=[ProfilerActivity.CUDA])
    span: dict[str, float] = {}

    def start() -> None:
        torch.cuda.synchronize()
        tracer.start()
        span["began"], span["first"] = time.perf_counter(), steps.count

    def stop() -> None:
        torch.cuda.synchronize()
        span["seconds"] = time.perf_counter() - span["began"]
        span["steps"] = steps.count - span["first"]
        tracer.stop()

    first = size.completion // 2
    steps.hooks = {first: start, first + TRACED_STEPS: stop}
    driver.run(make_prompts(size, "trace"), size.completion)
    if steps.hooks:
        raise RuntimeError(f"{steps.count} steps are too few: {TRACED_STEPS} from {first} on")
    kernels: dict[str, list[float]] = {}
    spans: list[tuple[float, float]] = []
    for event in tracer.events() or ():
        if "cuda" in str(event.device_type).lower():
            began, ended = event.time_range.start, event.time_range.end
            spans.append((began, ended))
            kernels.setdefault(event.name[:200], []).append(ended - began)
    busy, until = 0.0, -1.0
    for began, ended in sorted(spans):
        busy += max(0.0, ended - max(began, until))
        until = max(until, ended)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:25]
    return {
        "ms_per_step": 1e3 * span["seconds"] / span["steps"],
        "busy_ms_per_step": busy / 1e3 / span["steps"],
        "busy_fraction": busy / 1e6 / span["seconds"],
        "kernels_ms_per_step": {
            name: [sum(times) / 1e3 / span["steps"], len(times) / span["steps"]]
            for name, times in longest
        },
    }
