"""`keel judge`: a file of answers, judged as in a run, so that a rubric can be tried before one.

    {"prompt": "…", "answer": "…", "criteria": [{"name": "…", "text": "…", "weight": 1}]}

A line may have `messages` in place of `prompt`, and `reference`, `thinking` and `id`; `reward`, a
whole reward spec, in place of `criteria`; and neither where a rubric comes along for all lines.
"""

from __future__ import annotations

import difflib
import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import yaml
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keel.rewards.judge.results import Failed, FailureKind, Judged, JudgeSettings, Server
from keel.rewards.judge.rubric import Rubric
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import judged_spec
from keel.rl.types import Prompt

KEYS = ("prompt", "messages", "answer", "thinking", "criteria", "reference", "reward", "id")
COUNTING = threading.Lock()
SHOWN = 50
"""Rows of the table; the file of results has all."""


@dataclass(frozen=True, slots=True)
class Item:
    """One line: an answer, and what it is judged by."""

    label: str
    prompt: Prompt
    answer: str
    thinking: str

    @property
    def calls(self) -> int:
        """The most calls that one sample takes, without retries."""
        spec = judged_spec(self.prompt.reward)
        if isinstance(spec, Rubric):
            return len({criterion.thinking for criterion in spec.criteria})
        return 3


def read_answers(path: Path, rubric: Path | None = None) -> list[Item]:
    """The answers in the JSONL file `path`; `rubric`: for lines that have no criteria.

    Raises ValueError naming file and line for whatever cannot be judged.
    """
    common = None if rubric is None else read_rubric(rubric)
    items: list[Item] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            items.append(_item(line, str(number), common))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not items:
        raise ValueError(f"{path}: holds no answer")
    return items


def read_rubric(path: Path) -> Mapping[str, Any]:
    """The reward spec in a YAML or JSON file: `criteria` and maybe `reference`, or a bare list of
    criteria, or `kind: proof`. Raises ValueError naming the file."""
    text = _text(path)
    try:
        content: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{path}: not valid YAML or JSON: {error}") from error
    if isinstance(content, list):
        content = {"criteria": cast(list[Any], content)}
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must hold `criteria: …`")
    spec: dict[str, Any] = {"kind": "rubric", **cast(dict[str, Any], content)}
    try:
        judged_spec(spec)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return spec


class Shown(Protocol):
    """A wait that is shown."""

    done: float


class Show(Protocol):
    """Of how many answers (0: none)."""

    def __call__(self, what: str, *, total: int = 0) -> AbstractContextManager[Shown]: ...


@dataclass(slots=True)
class _Unseen:
    done: float = 0.0


def _unseen(what: str, *, total: int = 0) -> AbstractContextManager[Shown]:
    return nullcontext(_Unseen())


def judge_answers(
    items: Sequence[Item],
    settings: JudgeSettings,
    out: Path,
    console: Console,
    *,
    server: Server | None = None,
    show: Show = _unseen,
) -> int:
    """Judge `items`, write a line of JSON for each to `out` in their order, and print a table.
    show: what is waited for; what it gives has `done` of the answers.

    Returns how many could not be judged. Raises ValueError for a judge that cannot be used, and
    JudgeStopped when it gives out; what was judged by then is in `out`.
    """
    with JudgeService(settings, server=server) as judge:
        with show("starting the judge" if server else "asking the judge whether it is there"):
            judge.check_reachable()
        most = sum(item.calls for item in items) * settings.samples
        console.print(
            f"{len(items)} answers, judged by {settings.model}: at most {most} calls",
            markup=False,
            highlight=False,
        )
        pending = [
            judge.submit_text(item.prompt, item.answer, thinking=item.thinking) for item in items
        ]
        with show("judging", total=len(items)) as shown:
            # In any order: the first may take the longest.
            for future in pending:
                future.add_done_callback(lambda _: _count(shown))
            done = _written(items, pending, out)
            with COUNTING:
                shown.done = len(items)  # the last one's may be under way
        counts = judge.counts()
    console.print(_table(done))
    judged = [result for _, result in done if isinstance(result, Judged)]
    lines = [f"mean score {sum(r.value for r in judged) / len(judged):.3f}"] if judged else []
    lines += [f"{name} {mean:.3f}" for name, mean in _means(judged).items()]
    console.print(" · ".join(lines), markup=False, highlight=False)
    failed = len(done) - len(judged)
    console.print(
        f"judged {len(judged)}, failed {failed}{_kinds(counts.failed)}; {counts.calls} calls, "
        f"{sum(counts.retried.values())} of them again{_kinds(counts.retried)}, {counts.cached} "
        f"from the cache; {counts.prompt_tokens:,} tokens in, {counts.reply_tokens:,} out\n"
        f"reasons: {out}",
        markup=False,
        highlight=False,
    )
    return failed


def _kinds(counted: Mapping[FailureKind, int]) -> str:
    said = ", ".join(f"{number} {kind}" for kind, number in counted.items())
    return f" ({said})" if said else ""


def _count(shown: Shown) -> None:
    with COUNTING:
        shown.done += 1


def _written(
    items: Sequence[Item], pending: Sequence[Future[Judged | Failed]], out: Path
) -> list[tuple[Item, Judged | Failed]]:
    """The results, each written down as it comes."""
    done: list[tuple[Item, Judged | Failed]] = []
    try:
        file = out.open("w", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{out}: cannot be written: {error}") from error
    with file:
        for item, future in zip(items, pending, strict=True):
            result = future.result()
            line: dict[str, Any] = {"id": item.label}
            if isinstance(result, Judged):
                line |= {"score": result.value, "parts": dict(result.parts)}
                line["verdicts"] = [asdict(verdict) for verdict in result.verdicts]
            else:
                line |= {"score": None, "failed": asdict(result)}
            file.write(json.dumps(line) + "\n")
            file.flush()
            done.append((item, result))
    return done


def _item(line: str, number: str, common: Mapping[str, Any] | None) -> Item:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError("must be an object")
    fields = cast(dict[str, Any], record)
    label = str(fields.get("id", number))
    for key in fields:
        near = difflib.get_close_matches(key, KEYS, n=1, cutoff=0.8)
        if key not in KEYS and near:
            raise ValueError(f"no such key as {key!r}; did you mean {near[0]}?")
    spec = _spec(fields, common)
    judged_spec(spec)
    return Item(
        label=label,
        prompt=Prompt(
            prompt_id=label, domain="judge", messages=tuple(_messages(fields)), reward=spec
        ),
        answer=_string(fields, "answer"),
        thinking=_string(fields, "thinking", ""),
    )


def _spec(fields: Mapping[str, Any], common: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if "reward" in fields:
        if not isinstance(fields["reward"], dict):
            raise ValueError("`reward` must be a reward spec")
        return cast(dict[str, Any], fields["reward"])
    if "criteria" in fields:  # in place of all that the rubric for all lines says
        spec: dict[str, Any] = {"kind": "rubric", "criteria": fields["criteria"]}
    else:
        spec = dict(common or {})
    if not spec:
        raise ValueError("no `criteria`; give them in the line, or a rubric for all with --rubric")
    if "reference" in fields:
        spec["reference"] = fields["reference"]
    return spec


def _messages(fields: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    if "messages" not in fields:
        return [{"role": "user", "content": _string(fields, "prompt")}]
    messages = fields["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError("`messages` must be a list of at least one message")
    chat = cast(list[Any], messages)
    for message in chat:
        if not isinstance(message, dict) or not isinstance(
            cast(dict[str, Any], message).get("content"), str
        ):
            raise ValueError("each of `messages` needs `role` and `content`, both text")
    return chat


def _string(fields: Mapping[str, Any], key: str, default: str | None = None) -> str:
    value = fields.get(key, default)
    if not isinstance(value, str):
        raise ValueError(f"`{key}` must be text" if key in fields else f"no `{key}`")
    return value


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: cannot be read as UTF-8 text: {error}") from error


def _table(done: Sequence[tuple[Item, Judged | Failed]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("id", no_wrap=True)
    table.add_column("score", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("verdicts")
    for item, result in done[:SHOWN]:
        if isinstance(result, Failed):
            table.add_row(_visible(item.label), "failed", "", _visible(result.reason))
            continue
        verdicts = ", ".join(f"{verdict.name} {verdict.score:g}" for verdict in result.verdicts)
        if all(score == 0 for score in result.parts.values()) and result.verdicts:
            verdicts += f" ({result.verdicts[0].reason})"
        spread = result.parts["disagreement"]
        table.add_row(
            _visible(item.label), f"{result.value:.3f}", f"{spread:.2f}", _visible(verdicts)
        )
    if len(done) > SHOWN:
        table.add_row("…", "", "", f"{len(done) - SHOWN} more in the file")
    return table


def _visible(text: str) -> Text:
    """For a terminal: judges quote answers, and an answer may hold escape sequences."""
    return Text("".join(c if c.isprintable() else " " for c in text)[:300])


def _means(judged: Sequence[Judged]) -> dict[str, float]:
    """Mean score of each criterion, by name."""
    scores: dict[str, list[float]] = {}
    for result in judged:
        for verdict in result.verdicts:
            scores.setdefault(verdict.name, []).append(verdict.score)
    return {name: sum(values) / len(values) for name, values in scores.items()}
