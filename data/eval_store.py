"""Read and write the results folder of `keel eval`.

Results are saved after each prompt, so that a stopped evaluation can resume.

samples.jsonl   one line per prompt and variant: its completions and their scores
results.json    summary by variant and prompt set
settings.json   the settings that affect the completions
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.schema import Config, ConfigError
from keel.configs.work_folder import WorkFolder, read_records
from keel.data.items import prompt_digest
from keel.rl.records import trajectory_record
from keel.rl.summary import ERROR, passed
from keel.rl.types import Prompt, ScoredGroup, Trajectory

_SAMPLES, _RESULTS = "samples.jsonl", "results.json"
_DEPENDS_ON = (
    *("eval.", "rollout.sampling.", "agents.", "run.seed", "model.path"),
    *("endpoint.tells_thinking", "endpoint.extra"),
    *("data.max_prompt_tokens", "data.long_prompts", "rollout.timeout_s"),
    *("rollout.dtype", "rollout.quantization", "rollout.head_dtype"),
)
_IGNORED = ("eval.dir", "eval.variants")
_SCORED_BY = re.compile(
    r"(model|rewards)\.|data\.sources\[.*\]\.(rewards|environment|budget|length)\.|"
    r"data\.sources\[.*\]\.(thinking|system|raw)"
)
"""Settings other than `RESUMABLE_KNOBS` that affect completions and scores."""
RIGHT = "(right)"
"""Placeholder for every correct answer, so that different spellings of it count as one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledPrompt:
    """A prompt and the completions sampled for it in one variant."""

    variant: str
    source: str
    domain: str
    id: str
    digest: str  # digest of the recipe's prompt before the variant changes it
    samples: Sequence[Mapping[str, Any]]
    """One dict per completion with the keys correct, error, parts, tokens, thinking (the thinking
    length), finish_reason, answer, messages, turns (in an environment) and `record` (additional
    keys for `keel sft`)."""
    missing: Sequence[str]  # the reason for each missing completion
    prompt: Sequence[Mapping[str, Any]] = ()  # messages of the recipe's prompt
    expected: str = ""

    @property
    def number(self) -> int:
        return len(self.samples) + len(self.missing)

    @property
    def passes(self) -> int:
        return sum(passed(sample["correct"]) for sample in self.samples)

    @property
    def right(self) -> list[bool]:
        """Whether each completion is correct. Missing completions count as wrong."""
        return [passed(s["correct"]) for s in self.samples] + [False] * len(self.missing)

    @property
    def steps(self) -> list[int | None]:
        """Number of turns in each completion, or None if it didn't finish or has no turns."""
        ended = [s.get("turns") if s["finish_reason"] == "stop" else None for s in self.samples]
        return ended + [None] * len(self.missing)

    @property
    def answers(self) -> list[str]:
        given = [RIGHT if passed(s["correct"]) else str(s["answer"]) for s in self.samples]
        return given + [""] * len(self.missing)


def collect_samples(
    variant: str,
    source: str,
    prompt: Prompt,
    groups: Sequence[ScoredGroup],
    answer: Callable[[Trajectory], str],
    thinking: Callable[[Trajectory], int],
    *,
    tokenizer: str = "",
) -> SampledPrompt:
    """Collect a prompt's completions. `answer` extracts a completion's final answer in a form that
    can be compared, or "". `thinking` returns the length of its thinking. `tokenizer` is a digest
    of the policy's tokenizer, if known."""

    def messages_and_record(prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
        """Return a completion's messages and its record for `keel sft`. The record also holds the
        prompt's messages (`asked`), or all conversations of an agent program."""
        record = trajectory_record(prompt, trajectory, tokenizer=tokenizer)
        if trajectory.dialogues:
            return {"messages": [dict(m) for m in trajectory.messages], "record": record}
        messages = record.pop("messages")
        start = len(messages) - len(trajectory.messages)
        return {"messages": messages[start:], "record": {**record, "asked": messages[:start]}}

    samples = [
        {
            "correct": float(parts["correct"]),
            "error": float(parts.get(ERROR, 0.0)),
            "parts": {k: v for k, v in parts.items() if k not in ("correct", ERROR)},
            "tokens": trajectory.sampled_tokens,
            "thinking": thinking(trajectory),
            "finish_reason": trajectory.finish_reason,
            "answer": answer(trajectory),
            **({} if trajectory.usage is None else {"turns": trajectory.usage.turns}),
            **messages_and_record(group.group.prompt, trajectory),
        }
        for group in groups
        for trajectory, parts in zip(group.group.trajectories, group.parts_G, strict=True)
    ]
    return SampledPrompt(
        variant=variant,
        source=source,
        domain=prompt.domain,
        id=prompt.prompt_id,
        digest=prompt_digest(prompt),
        samples=samples,
        missing=[reason for group in groups for reason in group.group.dropped],
        prompt=[dict(message) for message in prompt.messages],
        expected=prompt.expected,
    )


def read_evaluation(folder: Path) -> list[SampledPrompt]:
    """Read `samples.jsonl`. Raises ConfigError with the file name and line number of a malformed
    line."""
    kind = "an evaluation (a folder of keel eval)"
    return read_records(folder / _SAMPLES, lambda line: SampledPrompt(**line), kind)


def to_trajectory_record(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a completion into a trajectory record for `keel sft`."""
    record = dict(sample["record"])
    prompt = record.pop("asked", [])
    messages = record.pop("messages", None) or [*prompt, *sample["messages"]]
    parts = {"correct": sample["correct"], **(sample.get("parts") or {})}
    return {**record, "messages": messages, "parts": parts, "reward": sample["correct"]}


class EvaluationFolder(WorkFolder):
    """The results folder of an evaluation: an unfinished one with the same settings, or a new
    one."""

    def __init__(self, config: Config, policy: str, name: str) -> None:
        """Choose the folder. Raises ConfigError if `eval.dir` holds another evaluation."""
        under = config.run.folder / "eval" / name
        path = Path(config.eval.dir).expanduser() if config.eval.dir else under
        super().__init__(path, "eval.dir", "evaluation")
        variants = json.dumps([asdict(one) for one in config.eval.each_variant])
        self._settings = {"policy": policy, "variants": variants} | {
            knob: repr(value)
            for knob, value in flatten_config(config).items()
            if (knob.startswith(_DEPENDS_ON) and not knob.startswith(_IGNORED))
            or (_SCORED_BY.match(knob) and knob not in RESUMABLE_KNOBS)
        }
        self.asked: list[SampledPrompt] = []
        self._number = self._passes = 0  # running totals: progress is logged after each prompt
        while self._in_use():
            if config.eval.dir:
                raise self.error(
                    "holds an evaluation that has ended or has other settings; choose another "
                    "folder"
                )
            # The series of names is step_20, step_20.2, step_20.3.
            name, _, number = self.path.name.partition(".")
            self.path = self.path.with_name(f"{name}.{int(number or 1) + 1}")

    def resume(self) -> None:
        """Read the completions. Raises ConfigError if another evaluation has used the folder since
        it was chosen."""
        if self._in_use():
            raise self.error("another evaluation has just used it; run the command again")
        self.claim(self._settings)
        self.asked = self.records(_SAMPLES, lambda line: SampledPrompt(**line))
        self._number = sum(request.number for request in self.asked)
        self._passes = sum(request.passes for request in self.asked)

    def _in_use(self) -> bool:
        """Return True if the folder has a finished evaluation or one with other settings."""
        return (self.path / _RESULTS).exists() or bool(self.changed(self._settings))

    def waiting(self, variant: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Return the prompts not yet sampled in this variant. Raises ConfigError if a sampled
        prompt has the same ID but different text."""
        known = {one.id: one.digest for one in self.asked if one.variant == variant}
        for prompt in prompts:
            if known.get(prompt.prompt_id, prompt_digest(prompt)) != prompt_digest(prompt):
                raise ConfigError(
                    f"{self.path}: has completions to another prompt called {prompt.prompt_id}: "
                    "the data has changed. Choose another eval.dir, or bring it back"
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in known]

    def add(self, request: SampledPrompt) -> None:
        self.append(_SAMPLES, asdict(request))
        self.asked.append(request)
        self._number += request.number
        self._passes += request.passes

    def progress(self) -> str:
        if not self._number:
            return "nothing to keep so far"
        return f"pass@1 so far {self._passes / self._number:.3f}"

    def finish(self, result: Mapping[str, Any]) -> None:
        content = {"settings": self._settings, "results": result}
        self.write(_RESULTS, json.dumps(content, indent=1) + "\n")
