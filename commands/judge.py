"""`keel judge`: judge the answers in a file, to try out a rubric before a run.

    {"prompt": "…", "answer": "…", "criteria": [{"name": "…", "text": "…", "weight": 1}]}

A line can have `messages` instead of `prompt`, and a complete spec as `reward` instead of
`criteria`. Both can be left out if there is a common rubric for all lines. `reference`, `thinking`
and `id` are optional.
"""

import argparse
import difflib
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
import yaml

from keel.configs.load import load_config
from keel.configs.schema import ConfigError, JudgeConfig, RunConfig
from keel.data.conversations.forms import parse_chat
from keel.data.results import align_columns
from keel.data.rows import parse_object, read_lines
from keel.model.hub import download
from keel.rewards.judge.service import JudgeService
from keel.rewards.judge.specs import CallError, Judgement, ServedJudge, judged_spec
from keel.rl.types import Prompt
from keel.rollout.judge.server import JudgeServer
from keel.trainer.placement.nodes import start_ray, stop_ray
from keel.trainer.placement.watchdog import start_watchdog
from keel.trainer.run.progress import waiting

_KEYS = ("prompt", "messages", "answer", "thinking", "criteria", "reference", "reward", "id")
_MAX_ROWS = 50


def judge(options: argparse.Namespace) -> None:
    """Score the answers in a file using the judge and print the results."""
    recipe = load_config(options.recipe) if options.recipe else None
    settings = recipe.rewards.judge if recipe else JudgeConfig()
    hang_timeout_s = (recipe.run if recipe else RunConfig()).hang_timeout_s
    names = ("base_url", "model", "api_key_env", "samples", "serve")
    changes = {name: getattr(options, name) for name in names}
    settings = replace(settings, **{k: v for k, v in changes.items() if v is not None})
    if not settings.model:
        raise ConfigError(
            "no judge. Set --model with --base-url or --serve, or --recipe with a recipe that has "
            "rewards.judge"
        )
    path = Path(options.file)
    out = Path(options.out) if options.out else path.with_name(f"{path.name}.judged.jsonl")
    try:
        items = _read_answers(path, Path(options.rubric) if options.rubric else None)
        if out.resolve() == path.resolve():
            raise ValueError(f"--out {out}: would overwrite the answers")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    with ExitStack() as stack:
        servers: list[JudgeServer] = []
        if settings.serve:
            gpu = torch.cuda.is_available()
            settings.check_used(judged=True, gpu=gpu)
            download(settings.model)
            start_ray()
            stack.callback(stop_ray)
            stack.enter_context(start_watchdog(print, hang_timeout_s))
            for _ in range(settings.server.replicas):
                servers.append(JudgeServer(settings, gpu=gpu))
                stack.callback(servers[-1].stop)
        failed = _judge_answers(items, settings, out, servers=servers)
    if failed:
        raise RuntimeError(f"{failed} of {len(items)} answers could not be judged")


@dataclass(frozen=True, slots=True)
class _Answer:
    prompt: Prompt
    answer: str
    thinking: str


def _read_answers(path: Path, rubric: Path | None = None) -> list[_Answer]:
    """Read answers from a JSONL file. `rubric` is a file with criteria for lines that don't have
    their own. Raises ValueError naming the file and the line."""
    common: Mapping[str, Any] | None = None
    if rubric is not None:
        try:
            content: Any = yaml.safe_load(rubric.read_text(encoding="utf-8-sig"))
            if isinstance(content, list):
                content = {"criteria": cast(list[Any], content)}
            if not isinstance(content, dict):
                raise ValueError("must hold `criteria: …`")
            common = {"kind": "rubric", **cast(dict[str, Any], content)}
            judged_spec(common)
        except (OSError, yaml.YAMLError, ValueError) as error:
            raise ValueError(f"{rubric}: {error}") from error
    answers: list[_Answer] = []
    for number, line in read_lines(path):
        try:
            fields = parse_object(line, replace_surrogates=True)[0]
            answers.append(_parse_answer(fields, str(number), common))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
    if not answers:
        raise ValueError(f"{path}: the file has no answers")
    return answers


def _parse_answer(fields: dict[str, Any], number: str, common: Mapping[str, Any] | None) -> _Answer:
    for key in fields:  # other columns are ignored, but not a misspelt name
        if key not in _KEYS and (near := difflib.get_close_matches(key, _KEYS, n=1, cutoff=0.8)):
            raise ValueError(f"unknown key {key!r}; did you mean {near[0]}?")
    spec: Any = fields.get("reward")
    if spec is None:
        spec = common
        if "criteria" in fields:
            spec = {"kind": "rubric", "criteria": fields["criteria"]}
        if not spec:
            raise ValueError("no `criteria`; add them to the line, or use --rubric")
        if "reference" in fields:
            spec = {**spec, "reference": fields["reference"]}
    if not isinstance(spec, Mapping):
        raise ValueError("`reward` must be a reward spec")
    reward = cast(Mapping[str, Any], spec)
    judged_spec(reward)
    answer, thinking = fields.get("answer"), fields.get("thinking", "")
    if not isinstance(answer, str) or not isinstance(thinking, str):
        raise ValueError(
            "`answer` must be text, and so must `thinking`, if there is any; the line has "
            f"{', '.join(fields) or 'no keys'}"
        )
    messages: Any = fields.get("messages")
    if not messages:
        if not isinstance(fields.get("prompt"), str):
            raise ValueError("needs `prompt`, a text, or `messages` with `role` and `content`")
        messages = [{"role": "user", "content": fields["prompt"]}]
    label = str(fields.get("id", number))
    prompt = Prompt(
        prompt_id=label, domain="judge", messages=tuple(parse_chat(messages)), reward=reward
    )
    return _Answer(prompt, answer, thinking)


def _judge_answers(
    answers: Sequence[_Answer],
    settings: JudgeConfig,
    out: Path,
    *,
    servers: Sequence[ServedJudge] = (),
) -> int:
    """Judge all answers, write the results to `out` as JSON lines, and print a summary table.
    Returns the number of answers that could not be judged.

    Raises ValueError if the judge cannot be used. Raises RewardStopped if it stops early; `out`
    then contains the results so far.
    """
    with JudgeService(settings, servers=servers) as judge:
        with waiting("starting the judge" if servers else "connecting to the judge"):
            judge.check_reachable()
        results: list[Judgement | CallError] = []
        with (
            out.open("w", encoding="utf-8") as file,
            waiting("judging", total=len(answers), unit="answers") as progress,
        ):
            futures = [judge.submit(a.prompt, a.answer, a.thinking) for a in answers]
            for answer, future in zip(answers, futures, strict=True):
                result = future.result()
                line: dict[str, Any] = {"id": answer.prompt.prompt_id}
                if isinstance(result, Judgement):
                    line |= {"score": result.value, "parts": dict(result.parts)}
                    line["verdicts"] = [asdict(verdict) for verdict in result.verdicts]
                else:
                    line |= {
                        "score": None,
                        "failed": {"kind": result.kind, "reason": result.reason},
                    }
                file.write(json.dumps(line) + "\n")
                file.flush()
                results.append(result)
                progress.done = len(results)
        counts = judge.counts()
    print("\n".join(_results_table(answers, results)))
    scores: dict[str, list[float]] = {}
    for result in results:
        if isinstance(result, Judgement):
            scores.setdefault("mean score", []).append(result.value)
            for verdict in result.verdicts:
                scores.setdefault(verdict.name, []).append(verdict.score)
    failures = sum(isinstance(result, CallError) for result in results)
    print(" · ".join(f"{_printable(name)} {fmean(of):.3f}" for name, of in scores.items()))
    print(
        f"judged {len(results) - failures}, failed {failures}; {counts.calls} calls, "
        f"{counts.retried.total()} of them retries, {counts.cache_hits} cached; "
        f"{counts.prompt_tokens:,} tokens in, {counts.reply_tokens:,} out\nreasons: {out}"
    )
    return failures


def _results_table(
    answers: Sequence[_Answer], results: Sequence[Judgement | CallError]
) -> list[str]:
    rows = [["", "score", "spread", ""]]
    for answer, result in list(zip(answers, results, strict=True))[:_MAX_ROWS]:
        score, spread, text = "failed", "", ""
        if isinstance(result, CallError):
            text = result.reason
        else:
            score, spread = f"{result.value:.3f}", f"{result.parts['disagreement']:.2f}"
            text = ", ".join(f"{verdict.name} {verdict.score:g}" for verdict in result.verdicts)
        rows.append([_printable(answer.prompt.prompt_id), score, spread, _printable(text)])
    if len(results) > _MAX_ROWS:
        rows.append(["…", "", "", f"{len(results) - _MAX_ROWS} more in the file"])
    table = align_columns([row[:3] for row in rows])
    return [f"{line}  {row[3]}".rstrip() for line, row in zip(table, rows, strict=True)]


def _printable(text: str) -> str:
    """Replace control characters, because a judge may quote an answer with escape sequences."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]
