"""Train a judge from labelled verdicts: `python -m keel.examples.judges LABELLED --out FILE`.

Each line of LABELLED has the task, an answer, the criteria and the right verdict on each criterion:

    {"prompt": "…", "answer": "…", "criteria": [{"name": "brief", "text": "…", "weight": 1}],
     "verdicts": {"brief": "met"}, "reasons": {"brief": "optional"}}

A line can also have a proof, an evaluation of it and the evaluation's right score, for training a
meta-verifier (DeepSeekMath-V2, 2025, section 2.1):

    {"prompt": "Show that …", "answer": "…", "evaluation": "…", "score": 0.5, "analysis": "…"}

Each line of FILE asks the policy for verdicts, with the same messages that a judge gets in a run.
It is meant for a source whose reward is `keel.examples.judges.agreement`. With `--sft`, each line
is instead a conversation for `keel sft` that includes the reply.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from keel.examples import write_lines
from keel.rewards.custom import TextTrajectory
from keel.rewards.judge.prompts import VERDICTS, BadReply, Question, meta_question, rubric_question
from keel.rewards.judge.specs import Criterion
from keel.rl.types import Prompt


def agreement(prompt: Prompt, trajectory: TextTrajectory) -> float:
    """Reward agreement between the policy's verdicts and the labels. The reward is 1 − |verdict −
    label| averaged over the criteria, where met is 1, partly 0.5 and missed 0. For an evaluation of
    a proof, the reward is 1 − |score − label|. For an invalid response, it is 0."""
    labels: Mapping[str, Any] = prompt.reward["columns"]["labels"]
    answer = trajectory.answer.strip()
    try:
        if "score" in labels:
            return 1 - abs(meta_question((), "", "").read(answer).score - labels["score"])
        reply = rubric_question((), dict.fromkeys(labels, ""), "", {}).read(answer)
    except BadReply:
        return 0.0
    return sum(1 - abs(reply[key][0] - VERDICTS[label]) for key, label in labels.items()) / len(
        labels
    )


def _labelled(row: Mapping[str, Any]) -> tuple[Question[Any], dict[str, Any], dict[str, Any]]:
    task: list[dict[str, Any]] = row["prompt"]
    if isinstance(row["prompt"], str):
        task = [{"role": "user", "content": row["prompt"]}]
    if "evaluation" in row:
        score = float(row["score"])
        if not 0 <= score <= 1:
            raise ValueError(f"score {score:g} is not from 0 to 1")
        question = meta_question(task, row["answer"], row["evaluation"])
        reply = {"analysis": str(row.get("analysis") or ""), "score": f"{score:g}"}
        return question, {"score": score}, reply
    criteria = [Criterion.model_validate({"weight": 1.0, **one}) for one in row["criteria"]]
    names = {f"c{place}": one.name for place, one in enumerate(criteria, start=1)}
    texts = {key: one.text for key, one in zip(names, criteria, strict=True)}
    labels = {key: str(row["verdicts"][name]) for key, name in names.items()}
    if unknown := set(labels.values()) - set(VERDICTS):
        raise ValueError(f"{unknown.pop()!r} is no verdict: {', '.join(VERDICTS)}")
    reasons: Mapping[str, Any] = row.get("reasons") or {}
    reply = {
        key: {"reason": str(reasons.get(name, "")), "verdict": labels[key]}
        for key, name in names.items()
    }
    material = {"answer": row["answer"]}
    return rubric_question(task, texts, row.get("reference") or "", material), labels, reply


def _lines(path: Path, *, sft: bool) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not line.strip():
            continue
        digest = hashlib.sha256(line).hexdigest()[:16]
        try:
            question, labels, reply = _labelled(json.loads(line))
            messages, content = question.messages(digest), json.dumps(reply, ensure_ascii=False)
            if sft:
                question.read(content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}:{number}: not a labelled answer: {error!r}") from error
        if sft:
            yield {"messages": [*messages, {"role": "assistant", "content": content}]}
        else:
            yield {"id": digest, "messages": messages, "labels": labels}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m keel.examples.judges")
    parser.add_argument("labelled", type=Path, help="JSONL file of labelled answers")
    parser.add_argument("--out", type=Path, required=True, help="the JSONL file to write")
    parser.add_argument("--sft", action="store_true", help="write conversations for keel sft")
    options = parser.parse_args(arguments)
    rows = _lines(options.labelled, sft=options.sft)
    return write_lines(options.out, rows, "answers to judge")


if __name__ == "__main__":
    sys.exit(main())
