"""What `keel eval` leaves behind, prompt by prompt, so that a stopped one goes on where it was.

samples.jsonl   a line for each prompt in each variant: its completions and what each is worth
results.json    what they come to, by variant and set
settings.json   what they depend on
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

from keel.configs.diff import RESUMABLE_KNOBS, flatten_config
from keel.configs.schema import Config, ConfigError
from keel.configs.work_folder import WorkFolder
from keel.data.pass_rates import digest_of
from keel.rl.evaluation import ERROR, passed
from keel.rl.records import trajectory_record
from keel.rl.types import Prompt, ScoredGroup, Trajectory

DEPENDS_ON = (
    *("eval.", "rollout.sampling.", "agents.", "run.seed", "model.path"),
    *("endpoint.tells_thinking", "endpoint.extra"),
    *("data.max_prompt_tokens", "data.long_prompts", "rollout.timeout_s"),
    *("rollout.dtype", "rollout.head_dtype"),
)
SPARED = ("eval.dir", "eval.against", "eval.variants")
SCORED_BY = re.compile(
    r"(model|rewards)\.|data\.sources\[.*\]\.(rewards|environment|budget|length)\.|"
    r"data\.sources\[.*\]\.(thinking|system|raw)"
)
"""Knobs that completions and what they are worth depend on as well, RESUMABLE_KNOBS left out."""
RIGHT = "(right)"
"""The answer of whatever passes: two ways of writing what is right are one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt as it was asked in a variant, and what came."""

    variant: str
    source: str
    domain: str
    id: str
    """`Prompt.prompt_id`."""
    digest: str
    """Of the prompt as the recipe has it, before any variant."""
    samples: Sequence[Mapping[str, Any]]
    """Of each completion: correct, error, parts, tokens, thinking (characters), finish_reason,
    answer, messages, and turns, if it worked in an environment; and `record`, what `keel sft` needs
    beside them."""
    missing: Sequence[str]
    """A reason for each completion that was asked for and did not come."""
    prompt: Sequence[Mapping[str, Any]] = ()
    """Its messages, as the recipe has them."""
    expected: str = ""
    """`Prompt.expected`."""

    @property
    def number(self) -> int:
        return len(self.samples) + len(self.missing)

    @property
    def passes(self) -> int:
        return sum(passed(sample["correct"]) for sample in self.samples)

    @property
    def right(self) -> list[bool]:
        """One for each completion, the missing ones wrong."""
        return [passed(s["correct"]) for s in self.samples] + [False] * len(self.missing)

    @property
    def steps(self) -> list[int | None]:
        """Turns of each completion; None where it was cut, is missing, or had none."""
        ended = [s.get("turns") if s["finish_reason"] == "stop" else None for s in self.samples]
        return ended + [None] * len(self.missing)

    @property
    def answers(self) -> list[str]:
        """One for each completion, the missing ones' empty."""
        given = [RIGHT if passed(s["correct"]) else str(s["answer"]) for s in self.samples]
        return given + [""] * len(self.missing)


def asked_of(
    variant: str,
    source: str,
    prompt: Prompt,
    groups: Sequence[ScoredGroup],
    answer: Callable[[Trajectory], str],
    thinking: Callable[[Trajectory], str],
    *,
    tokenizer: str = "",
) -> Asked:
    """answer: what a completion answers, as text that others can agree with; "" where nothing.
    thinking: all that it thought. tokenizer: digest of the policy's, where its tokens are known."""
    samples = [
        {
            "correct": float(parts["correct"]),
            "error": float(parts.get(ERROR, 0.0)),
            "parts": {k: v for k, v in parts.items() if k not in ("correct", ERROR)},
            "tokens": trajectory.sampled_tokens,
            "thinking": len(thinking(trajectory)),
            "finish_reason": trajectory.finish_reason,
            "answer": answer(trajectory),
            **({} if trajectory.usage is None else {"turns": trajectory.usage.turns}),
            **_kept(group.group.prompt, trajectory, tokenizer),
        }
        for group in groups
        for trajectory, parts in zip(group.group.trajectories, group.parts_G, strict=True)
    ]
    return Asked(
        variant=variant,
        source=source,
        domain=prompt.domain,
        id=prompt.prompt_id,
        digest=digest_of(prompt),
        samples=samples,
        missing=[reason for group in groups for reason in group.group.dropped],
        prompt=[dict(message) for message in prompt.messages],
        expected=prompt.expected,
    )


def _kept(prompt: Prompt, trajectory: Trajectory, tokenizer: str) -> dict[str, Any]:
    """Return its messages, those that were asked apart, and the rest of its record. An agent
    program's record has the messages of each of its conversations, too."""
    record = trajectory_record(prompt, trajectory, tokenizer=tokenizer)
    if trajectory.dialogues:
        return {"messages": [dict(message) for message in trajectory.messages], "record": record}
    messages = record.pop("messages")
    said = len(messages) - len(trajectory.messages)
    return {"messages": messages[said:], "record": {**record, "asked": messages[:said]}}


def read_evaluation(folder: Path) -> list[Asked]:
    """Raises ConfigError naming file and line."""
    path = folder / "samples.jsonl"
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        inside = sorted(str(file.parent) for file in folder.glob("eval/*/samples.jsonl"))
        such = f"; it has {', '.join(inside)}" if inside else ", such as RUN/eval/step_000020"
        raise ConfigError(
            f"{path}: cannot be read as an evaluation: there is none; name a folder that `keel "
            f"eval` has written{such}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read as an evaluation: {error}") from error
    asked: list[Asked] = []
    for number, line in enumerate(data.split(b"\n")[:-1], start=1):
        try:
            asked.append(asked_in(json.loads(line.decode("utf-8", "surrogatepass"))))
        except ValueError as error:
            raise ConfigError(f"{path}:{number}: no line of an evaluation: {error}") from error
    return asked


def asked_in(line: Any) -> Asked:
    """Raises ValueError for what is no line of an evaluation."""
    if not isinstance(line, dict):
        raise ValueError("it is no object in JSON")
    columns, known = cast(dict[str, Any], line), {field.name: field for field in fields(Asked)}
    lacking = [n for n, field in known.items() if field.default is MISSING and n not in columns]
    unknown = [n for n in columns if n not in known]
    if lacking or unknown:
        has = f"it has {', '.join(unknown)}" if unknown else ""
        lacks = f"it has no {', '.join(lacking)}" if lacking else ""
        raise ValueError(lacks or f"{has}, which this release does not know")
    return Asked(**columns)


class EvaluationFolder:
    """Open as a context: finds or creates the folder, and holds it while open."""

    def __init__(self, config: Config, policy: str, name: str) -> None:
        """policy: whose completions, for people; name: of the folder in `run.dir`/eval, where
        `eval.dir` does not say another."""
        self._given = bool(config.eval.dir)
        under = Path(config.run.dir).expanduser() / "eval" / name
        self.path = Path(config.eval.dir).expanduser() if self._given else under
        flat = flatten_config(config)
        self._settings = {
            "policy": policy,
            "variants": json.dumps([asdict(one) for one in config.eval.each_variant]),
            **{
                knob: repr(value)
                for knob, value in flat.items()
                if (knob.startswith(DEPENDS_ON) and not knob.startswith(SPARED))
                or (SCORED_BY.match(knob) and knob not in RESUMABLE_KNOBS)
            },
        }
        self.asked: list[Asked] = []
        self._number = self._passes = 0
        """Of all that were asked: known without going through them, since it is said after each."""

    def __enter__(self) -> Self:
        """Resumes an unfinished evaluation of the same settings, or begins a new one beside
        those that are there. Raises ConfigError if that cannot be."""
        with ExitStack() as stack:
            while not self._take(folder := WorkFolder(self.path, "eval.dir", "evaluation"), stack):
                if self._given:
                    raise folder.error(
                        "holds an evaluation that has ended or has other settings; choose another "
                        "folder"
                    )
                self.path = _next(self.path)
            folder.claim(self._settings)
            self._folder, self._lines = folder, folder.lines("samples.jsonl")
            self.asked = read_evaluation(self.path)
            self._number = self._passes = 0
            for asked in self.asked:
                self._count(asked)
            self._opened = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def waiting(self, variant: str, prompts: Sequence[Prompt]) -> list[Prompt]:
        """Those that have not been asked in this variant. Raises ConfigError where one was that had
        another text."""
        known = {one.id: one.digest for one in self.asked if one.variant == variant}
        for prompt in prompts:
            if known.get(prompt.prompt_id, digest_of(prompt)) != digest_of(prompt):
                raise ConfigError(
                    f"{self.path}: has completions to another prompt called {prompt.prompt_id}: "
                    "the data has changed. Choose another eval.dir, or bring it back"
                )
        return [prompt for prompt in prompts if prompt.prompt_id not in known]

    def add(self, asked: Asked) -> None:
        """Write down what came of a prompt in a variant."""
        self._lines.add(asdict(asked))
        self.asked.append(asked)
        self._count(asked)

    def said(self) -> str:
        """How it stands, in few words."""
        if not self._number:
            return "nothing to keep so far"
        return f"pass@1 so far {self._passes / self._number:.3f}"

    def _count(self, asked: Asked) -> None:
        self._number, self._passes = self._number + asked.number, self._passes + asked.passes

    def finish(self, found: Mapping[str, Any]) -> None:
        """All is there: write the results."""
        written = {"settings": self._settings, "results": found}
        self._folder.write("results.json", json.dumps(written, indent=1) + "\n")

    def _take(self, folder: WorkFolder, stack: ExitStack) -> bool:
        """Whether the folder is there, ours and not finished; it is open then."""
        with ExitStack() as held:
            held.enter_context(folder)
            if (self.path / "results.json").exists() or folder.changed(self._settings):
                return False
            stack.enter_context(held.pop_all())
        return True


def _next(path: Path) -> Path:
    """`step_20` → `step_20.2` → `step_20.3`."""
    name, _, number = path.name.partition(".")
    return path.with_name(f"{name}.{int(number or 1) + 1}")
