"""Runs the environments of PrimeIntellect's `verifiers` as agent programs, in an interpreter that
has `verifiers` 0.4 or later and the environment's package, but need not have Keel.

As a script, it writes an environment's tasks as JSONL. As a program (`rollout`), it runs one task.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "verifiers":
            raise
        cure = f"{sys.executable} -m pip install 'verifiers>=0.4'"
        raise ModuleNotFoundError(f"{error}; {cure}", name=error.name) from error


def _load_environment(config: dict[str, Any]) -> Any:
    """Create an environment whose agents run here. Where neither the config nor the environment
    names a harness, agents get the task's tools and no shell."""
    vf = _verifiers()
    try:
        settings = vf.resolve_env_config(config)
    except ModuleNotFoundError as error:
        cure = f"install its package with {sys.executable} -m pip"
        raise ModuleNotFoundError(f"{error}; {cure}", name=error.name) from error
    bundled = vf.default_harness_id(settings.taskset.id) == settings.taskset.id
    for name, agent in settings:
        if isinstance(agent, vf.AgentConfig):
            local = {"runtime": vf.SubprocessConfig()}
            if agent.harness is None and not bundled:
                local["harness"] = vf.harness_config_type("null")(id="null")
            setattr(settings, name, agent.model_copy(update=local))
    return vf.load_environment(settings)


async def _prepare_script(
    runtime: Any, script: str | bytes, env: Any = None, *, activate: bool = True
) -> list[str]:
    """Replaces the method of `verifiers` that installs a harness's script with uv, which needs a
    network. Such scripts run in this interpreter."""
    await runtime.write("harness.py", script.encode() if isinstance(script, str) else script)
    return [sys.executable, str(runtime.workdir / "harness.py")]


_OWN = (
    *("OPENAI_BASE_URL", "OPENAI_API_BASE", "OPENAI_API_KEY", "OPENAI_MODEL"),
    *("ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "KEEL_TASK", "KEEL_TASK_FILE", "KEEL_VERDICT"),
)
_ROUNDING = 1e-6
_KEY = "KEEL_POLICY_API_KEY"
"""Variable with the key of Keel's endpoint. `verifiers` keeps such names from harnesses."""


def _take_variables() -> dict[str, str]:
    """Remove what Keel sets from the environment variables, and return it. Otherwise rewards that
    ask a model would ask the policy, and shells would inherit the answer."""
    own = {name: os.environ.pop(name) for name in _OWN if name in os.environ}
    os.environ[_KEY] = own["OPENAI_API_KEY"]
    Path(own["KEEL_TASK_FILE"]).unlink()
    return own


def _ungraded(episode: Any) -> list[str]:
    """Return why an episode could not be graded. Empty if it was, or if a trained agent failed
    before scoring."""
    failed = [trace for trace in episode.traces if not trace.ok]
    if any(trace.agent.trainable and not trace.timing.finalize.start for trace in failed):
        return []
    errors = [error for error in episode.errors if ".finalize()" in error.message]
    errors += [error for trace in failed for error in trace.errors]
    unfinished = [trace for trace in episode.traces if trace.ok and None in trace.rewards.values()]
    return [f"{error.type}: {error.message}" for error in errors] + [
        f"agent {trace.agent.name!r} was not scored in time" for trace in unfinished
    ]


async def rollout(task: dict[str, Any], seed: int) -> None:
    """Run one line of `write_tasks` against Keel's endpoint. The verdict is the mean reward of the
    trained agents, scaled to 0 to 1, with the environment's rewards and metrics as facts."""
    if "environment" not in task.get("reward", {}):
        raise ValueError(
            "the prompt has no task of verifiers: set environment.tells_reward: true, and take the "
            "prompts from `verifiers_env.py` (docs/environments.md)"
        )
    row = task["reward"]["environment"]
    own, vf = _take_variables(), _verifiers()
    random.seed(seed)
    importlib.import_module("numpy").random.seed(seed % 2**32)
    runtimes = importlib.import_module("verifiers.v1.runtimes")
    if not hasattr(runtimes.SubprocessRuntime, "prepare_uv_script"):
        raise RuntimeError("this release of verifiers starts harnesses in a way unknown to Keel")
    runtimes.SubprocessRuntime.prepare_uv_script = _prepare_script
    env = _load_environment(row["config"])
    task_class = env.taskset.task_type()
    data = task_class.data_type().model_validate(row["task"])
    instance = task_class(data, env.config.taskset.task)
    url = own["OPENAI_BASE_URL"]
    client = vf.EvalClientConfig(base_url=url, api_key_var=_KEY)
    async with env.serving():
        context = vf.ModelContext(model=own["OPENAI_MODEL"], client=client)
        episode = await env.run_episode(instance, context)
    low, high = row["scale"]
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    reward = sum(trace.reward for trace in trained) / max(1, len(trained)) if episode.ok else low
    facts: dict[str, Any] = {}
    for trace in trained:
        prefix = f"{trace.agent.name}." if len(trained) > 1 else ""
        rewards = {name: one.value for name, one in trace.rewards.items() if one is not None}
        facts |= {f"{prefix}{name}": value for name, value in (rewards | trace.metrics).items()}
    score = (reward - low) / (high - low)
    ungraded = _ungraded(episode)
    # Keel drops the trajectory if the verdict is invalid, and shows this text.
    if ungraded:
        verdict = "; ".join(ungraded)
    elif not -_ROUNDING <= score <= 1 + _ROUNDING:
        verdict = f"reward {reward:g} is outside --scale {low:g} {high:g}"
    else:
        parts = {"correct": min(max(score, 0.0), 1.0)}
        verdict = json.dumps({"parts": parts, "facts": {**facts, "reward": reward}})
    for trace in episode.traces:
        if not trace.agent.trainable and trace.agent.config.client.base_url == url:
            verdict = (
                f"agent {trace.agent.name!r} isn't trained but samples from the policy: give it a "
                "client of its own in --config, and set environment.network: host"
            )
    # Also if the episode failed: Keel uses it where a budget of the recipe was spent.
    Path(own["KEEL_VERDICT"]).write_text(verdict, encoding="utf-8")
    if not (episode.ok or ungraded):
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        sys.exit("; ".join(f"{error.type}: {error.message}" for error in errors))


def write_tasks() -> None:
    """Print an environment's tasks as JSONL, each with all that `rollout` needs."""
    parser = argparse.ArgumentParser(prog=Path(__file__).name, description=write_tasks.__doc__)
    parser.add_argument("taskset", help="id of an installed environment")
    parser.add_argument("--config", type=json.loads, default={}, help="its settings as JSON")
    parser.add_argument("--scale", type=float, nargs=2, default=(0.0, 1.0), help="range of rewards")
    parser.add_argument("--limit", type=int, help="maximum number of tasks")
    given = parser.parse_args()
    if not given.scale[0] < given.scale[1]:
        parser.error("--scale takes the lowest reward, then a higher one")
    config = {**given.config, "taskset": {**given.config.get("taskset", {}), "id": given.taskset}}
    taskset = _load_environment(config).taskset
    if given.limit is None and not taskset.bounded:
        parser.error(f"{given.taskset} has endless tasks; set --limit")
    tasks: Iterator[Any] = itertools.islice(taskset, given.limit)
    shown = set[str]()
    for number, task in enumerate(tasks):
        text = "\n\n".join(filter(None, (task.data.system_prompt, task.data.prompt_text)))
        if not text or text in shown:  # Keel removes repeated questions
            text = f"{text}\n\n(task {number})".strip()
        shown.add(text)
        row = {"config": config, "scale": given.scale, "task": task.data.model_dump(mode="json")}
        print(json.dumps({"id": str(number), "prompt": text, "environment": row}))


if __name__ == "__main__":
    write_tasks()
