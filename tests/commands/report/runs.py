"""Run and evaluation folders whose texts try to inject HTML."""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from keel.configs.dump import dump_config
from keel.configs.load import load_config
from keel.configs.schema import RunConfig
from keel.data.eval_store import SampledPrompt
from keel.rl import types
from keel.rl.types import Group, Prompt, ScoredGroup, Trajectory
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts, saved_segments

BREAKS = "document.title='BROKEN'"
ATTACKS = (
    f"</script><script>{BREAKS}</script>",
    f"<!--<script>{BREAKS}",
    f"<img src=x onerror={BREAKS}><svg onload={BREAKS}>",
    f"</style></textarea><iframe srcdoc='<script>parent.{BREAKS}</script>'></iframe>",
    f"{{{{constructor.constructor('{BREAKS}')()}}}} ${{{BREAKS}}} \\u003cscript>{BREAKS}",
    "<a href=\"javascript:document.title='BROKEN'\">NaN</a>\u2028\ud83d",
)
KINDS = ("resume", "engine", "alarm")


class Bytes:
    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def answer(sibling: int, prompt: str, *turns: str, messages: Sequence[Any] = ()) -> Trajectory:
    parts = [list(turn.encode(errors="replace")) for turn in (prompt, *turns)]
    sampled = np.repeat([at % 2 == 1 for at in range(len(parts))], [len(part) for part in parts])
    ids = np.array([token for part in parts for token in part], np.int32)
    spans = [[int(token)] * bool(here) for token, here in zip(ids, sampled, strict=True)]
    segment = types.Segment(
        prompt_id="p",
        token_ids_T=ids,
        trainable_T=sampled,
        logp_old_T=np.where(sampled, -0.5, 0).astype(np.float32),
        version_T=np.where(sampled, 7, -1).astype(np.int32),
        sampling_mask=types.SamplingMasks.from_lists(spans),
    )
    return Trajectory(
        prompt_id="p",
        sibling=sibling,
        segments=(segment,),
        finish_reason="stop",
        messages=tuple(messages) or ({"role": "assistant", "content": turns[-1]},),
        usage=types.Usage(turns=2, calls=1) if len(turns) > 1 else None,
    )


def group_of(prompt: str, texts: Sequence[str], rewards: Sequence[float]) -> ScoredGroup:
    said = ({"role": "user", "content": prompt},)
    rewards_G = np.array(rewards, np.float32)
    return ScoredGroup(
        group=Group(
            prompt=Prompt(prompt_id=prompt, domain=f"domain {prompt}", messages=said),
            trajectories=tuple(answer(at, prompt, text) for at, text in enumerate(texts)),
            dropped=(f"dropped: {prompt}",),
        ),
        rewards_G=rewards_G,
        parts_G=tuple({"correct": reward, texts[0]: 0.5} for reward in rewards),
        advantages_G=rewards_G - rewards_G.mean(),
        notes_G=tuple({"blue": f"0.25: because {text}"} for text in texts),
    )


def episode() -> ScoredGroup:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    called = '<think>Let me add.</think>I call.<tool_call>{"name": "add"}</tool_call>'
    turns = (called, "<|tool|>the result is 3<|assistant|>", "It is 3.")
    thought = {"role": "assistant", "content": "I call.", "reasoning_content": "Let me add."}
    messages = (
        {"role": "user", "content": "Sum."},
        {**thought, "tool_calls": [call]},
        {"role": "tool", "content": "the result is 3", "name": "add"},
        {"role": "assistant", "content": "It is 3."},
    )
    made = answer(0, "<|user|>Sum.<|assistant|>", *turns, messages=messages)
    group = group_of("sums", ["x", "y"], [1, 0])
    both = (replace(made, opening=1), replace(made, opening=1, sibling=1))
    return replace(group, group=replace(group.group, trajectories=both))


def write_step(folder: Path, step: int, groups: Sequence[ScoredGroup], **metrics: float) -> None:
    names = {"reward/mean": step / 100, "time/rollout": 2.0, "time/train": 1.0, **metrics}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "time": 1e9 + 60 * step, **names}) + "\n")
    if not groups:
        return
    (folder / "trajectories").mkdir(exist_ok=True)
    run = RunConfig(dir="d", save_trajectories=10_000, save_tokens=10_000_000)

    def full(segment: types.Segment, value: float) -> Any:
        return np.full(len(segment.token_ids_T), value, np.float32)

    numbers = {
        number: types.TokenNumbers(logp_T=full(segment, -0.4), overlap_T=full(segment, 0.5))
        for number, segment in enumerate(saved_segments(groups, run))
    }
    path = folder / "trajectories" / f"step_{step:06d}.tokens.jsonl.gz"
    TokenFile(run, TokenTexts(Bytes()), lambda: numbers).write(path, groups)


def write_run(folder: Path, *overrides: str, steps: int = 3) -> Path:
    write_step(folder, 0, [], **{"eval/sums/pass@1": 0.25})
    for step in range(1, steps + 1):
        groups = [group_of(text, [text, "short"], [0, 1]) for text in ATTACKS]
        domains = {f"domain/{name}/reward_mean": 0.5 for name in ("a", ATTACKS[0])}
        write_step(folder, step, [*groups, episode()], **domains, **{"time/sync": 0.5})
    events = [{"step": 2, "time": 1e9, "kind": kind, "text": ATTACKS[2]} for kind in KINDS]
    (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    config = load_config("quickstart", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(dump_config(config))
    return folder


def write_evaluation(folder: Path, prompts: int = 2) -> Path:
    folder.mkdir(parents=True)
    common = {"error": 0.0, "parts": {"format": 1.0}, "tokens": 5, "thinking": 0, "answer": "1"}
    said = {"role": "assistant", "reasoning_content": "hm"}
    samples: list[dict[str, Any]] = [
        {
            **common,
            "correct": float(at),
            "finish_reason": "stop",
            "messages": [{**said, "content": t}],
        }
        for at, t in enumerate(ATTACKS[:2])
    ]
    about: dict[str, Any] = {
        "variant": "recipe",
        "source": "sums",
        "domain": "maths",
        "digest": "d",
    }
    about |= {"samples": samples, "missing": ["cut off"], "expected": "2"}
    prompt = [{"role": "user", "content": ATTACKS[0]}]
    lines = [
        SampledPrompt(**about, id=f"sums/{number}", prompt=prompt) for number in range(prompts)
    ]
    with (folder / "samples.jsonl").open("w") as file:
        file.writelines(json.dumps(asdict(line)) + "\n" for line in lines)
    (folder / "settings.json").write_text(json.dumps({"policy": "p", "run.seed": "0"}))
    return folder
