"""Proofs, tables whose answers are computed again, judges, and the small tasks."""

import asyncio
import csv
import io
import json
import re
from collections import defaultdict
from dataclasses import asdict, replace
from datetime import date
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from keel.agents.env_process.client import ProcessEnvironment
from keel.agents.env_process.launch import EnvironmentProgram
from keel.agents.environments.demonstrations import Demonstration
from keel.agents.environments.search.documents import ensure_index
from keel.agents.environments.search.environment import Search
from keel.configs.load import load_config
from keel.configs.paths import _PACKAGE
from keel.configs.schema import ConversationsConfig, EnvironmentConfig, SourceConfig
from keel.data.conversations.load import read_conversations
from keel.data.eval_store import collect_samples
from keel.data.jsonl import load_jsonl
from keel.examples.judges import agreement
from keel.examples.judges import main as write_judgements
from keel.examples.proofs.__main__ import main as make_proof_tasks
from keel.examples.proofs.problems import _make_evaluations
from keel.examples.proofs.problems import lines as problem_lines
from keel.examples.proofs.problems import main as write_problems
from keel.examples.proofs.refine import Refine
from keel.examples.small import demonstrations
from keel.examples.small.__main__ import make
from keel.examples.tables import _QUESTIONS, _rule_of, _task_lines
from keel.examples.tables import main as write_tables
from keel.model.tiny.cold_start import _conversation_ids
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rewards.checks import check_spec
from keel.rewards.custom import TextTrajectory
from keel.rewards.judge.prompts import meta_question
from keel.rewards.judge.specs import judged_spec
from keel.rewards.rules.verifiers import verifier_for
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt, Trajectory, Verdict
from tests.agents.sandboxes import wrap_of
from tests.rl.rollouts import scored, segment, trajectory


def proof_text(score: str, solution: str = "QED") -> str:
    return f"## Solution\n{solution}\n\n## Self Evaluation\nSo so.\n\\boxed{{{score}}}"


def test_until_the_policy_finds_nothing_to_mend() -> None:
    refine = Refine(most=5)
    assert "has score 0 by your own" in str(refine.reply(proof_text("0")))
    assert "needs one section `## Solution`" in str(refine.reply("I am done."))
    assert "has score 0.5" in str(refine.reply(proof_text("0.5")))
    assert refine.reply(proof_text("1")) is None
    assert refine.verdict((), "stop") == {"claimed": 1.0, "revised": 0.6}


def evaluation(folder: Path, *graded: tuple[str, float], error: float = 0.0) -> Path:
    texts = {"system": "Two sections.", "user": "Prove it."}
    messages = tuple({"role": role, "content": text} for role, text in texts.items())
    about = {"messages": messages, "reward": {"kind": "proof"}}
    prompt = Prompt(prompt_id="proofs/1", domain="proofs", **about)

    def proof(n: int, text: str) -> Trajectory:
        made = trajectory(segment(name="proofs/1"), sibling=n)
        return replace(made, messages=({"role": "assistant", "content": text},))

    proofs = [proof(n, text) for n, (text, _) in enumerate(graded)]
    parts = [{"correct": score, "error": error, "proof": score} for _, score in graded]
    group = scored(proofs, [score for _, score in graded], parts=parts)
    group = replace(group, group=replace(group.group, prompt=prompt))
    evaluated = collect_samples("recipe", "proofs", prompt, [group], lambda _: "", lambda _: 0)
    folder.mkdir()
    (folder / "samples.jsonl").write_text(json.dumps(asdict(evaluated)) + "\n")
    return folder


def test_graded_proofs_become_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, wrong = proof_text("1", "By \ud800 induction."), proof_text("1", "Obvious.")
    several = [(proof_text("0", f"Try {n}."), 0.0) for n in range(4)]
    first = evaluation(tmp_path / "a", (right, 1.0), (wrong, 0.0), ("no form", 0.0), (right, 1.0))
    second = evaluation(tmp_path / "b", *several, (proof_text("1", "Half."), 0.5))
    samples = second / "samples.jsonl"
    samples.write_text(samples.read_text().rstrip("\n"))  # as an editor may save it
    out = tmp_path / "verify.jsonl"
    assert make_proof_tasks([str(first), str(second), "--out", str(out), "--each", "2"]) == 0
    source = SourceConfig(name="v", source="jsonl", path=str(out))
    prompts = [item.prompt for item in load_jsonl(source, check_spec).items]
    pairs = [(prompt.reward["proof"], prompt.reward["score"]) for prompt in prompts]
    assert pairs == [("By ? induction.", 1.0), ("Obvious.", 0.0), ("Try 0.", 0.0), ("Half.", 0.5)]
    shown = prompts[1].messages[-1]["content"]
    assert "Prove it." in shown and "Obvious." in shown
    assert "Self Evaluation" not in shown and "score" not in shown
    samples.write_text('{"prompt": []}\n')
    assert make_proof_tasks([str(second), "--out", str(tmp_path / "none.jsonl")]) == 2
    message = f"{samples}:1: not a line of an evaluation: missing key 'samples'"
    assert capsys.readouterr().err.strip() == message


def test_shipped_problems_are_those_of_the_script() -> None:
    made = problem_lines()
    path = _PACKAGE / "mixed" / "proofs.jsonl"
    assert [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] == made
    assert len({line["messages"][1]["content"] for line in made}) == len(made)
    for line in made:
        judged_spec(line["reward"])


def test_evaluations_are_labelled_by_planted_flaws(tmp_path: Path) -> None:
    rows = _make_evaluations()
    right = {
        line["messages"][1]["content"]: line["reward"]["reference"] for line in problem_lines()
    }
    assert len(rows) == 3 * len(right) and len(right) >= 100
    for row in rows:
        assert (row["answer"] == right[row["prompt"]]) == (row["score"] == 0), row
        assert row["evaluation"].count("\n2. ") == (row["score"] == 0.5)
    labelled, out = tmp_path / "labelled.jsonl", tmp_path / "tasks.jsonl"
    write_problems([str(labelled), "--evaluations"])
    assert write_judgements([str(labelled), "--out", str(out)]) == 0
    assert len(out.read_text().splitlines()) == len(rows)


def answer_by_hand(kind: str, text: str, files: dict[str, str]) -> float | str:
    products = {row["product"]: row for row in json.loads(files["products.json"])}
    sales: list[dict[str, Any]] = []
    for row in csv.DictReader(io.StringIO(files["orders.csv"])):
        product = products[row["product"]]
        less = 1 - float(row["discount_percent"] or 0) / 100
        revenue = int(row["units"]) * product["price"] * less
        day = date.fromisoformat(row["day"])
        more = {"revenue": revenue, "day": day, "month": row["day"][:7]}
        sales.append({**row, **more, "category": product["category"]})
    if match := re.search(r"(?:from|of|ordered) (\w+)(?: in ([\d-]+)|[?,]| largest)", text):
        month = match[2] or ""
        ours = [x for x in sales if x["category"] == match[1] and month in x["month"]]
    else:
        ours = sales

    def ranked(key: str) -> list[str]:
        totals: dict[str, float] = defaultdict(float)
        for one in ours:
            totals[one[key]] += one["revenue"]
        return sorted(totals, key=totals.__getitem__, reverse=True)

    if kind in ("best_category", "best_month"):
        return ranked(kind.removeprefix("best_"))[0]
    if kind == "second_product":
        return ranked("product")[1]
    if kind == "buyers":
        return len({one["customer"] for one in ours})
    if kind == "days_between":
        days: dict[str, list[date]] = defaultdict(list)
        for one in ours:
            days[one["customer"]].append(one["day"])
        return round(mean((max(d) - min(d)).days for d in days.values() if len(d) > 1), 2)
    values = [one["revenue"] for one in ours]
    return round(sum(values) if kind == "revenue" else mean(values), 2)


@cache
def some() -> list[dict[str, Any]]:
    return list(_task_lines(4 * len(_QUESTIONS), seed=5))


@pytest.mark.parametrize("kind", _QUESTIONS)
def test_every_answer_by_hand(kind: str) -> None:
    chosen = [task for task in some() if f"-{kind}-" in task["id"]]
    assert len(chosen) == 4
    for task in chosen:
        text = task["prompt"].partition("\n\n")[2]
        value = answer_by_hand(kind, text, task["environment"]["files"])
        rule = {k: task[k] for k in task.keys() & {"answer", "match", "tolerance"}}
        verify = verifier_for({"kind": "answer", **rule})
        assert verify(f"So it is \\boxed{{{value}}}.") == 1.0, (value, task["answer"])
        wrong = f"{value}x" if isinstance(value, str) else f"{value + 1}"
        assert verify(f"\\boxed{{{wrong}}}") == 0.0


def test_unclear_answers_are_avoided() -> None:
    assert _rule_of([("a", 5.0), ("b", 5.0), ("c", 1.0)]) is None
    rule = {"answer": "b", "match": "exact"}
    assert _rule_of([("a", 5.0), ("b", 5.1), ("c", 1.0)]) == rule
    assert _rule_of([(0.02,)]) is None


def test_command_writes_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tables.jsonl"
    assert write_tables([str(path), "--count", "3", "--seed", "5"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == some()[:3]
    interpreter = EnvironmentConfig(target="keel.agents.environments.interpreter:Interpreter")
    source = SourceConfig(name="t", source="jsonl", path=str(path), environment=interpreter)
    prompts = [item.prompt for item in load_jsonl(source, check_spec).items]
    files = prompts[0].reward["environment"]["files"]
    assert files.keys() == {"orders.csv", "products.json"}
    assert write_tables([str(path), "--count", "1"]) == 2  # the file exists
    other = tmp_path / "other.jsonl"
    assert write_tables([str(other), "--count", "3"]) == 0  # a random seed
    assert json.loads(other.read_text().splitlines()[0]) != some()[0]


ROW: dict[str, Any] = {
    "prompt": "Name a river.",
    "answer": "The Rhine, a long river.",
    "criteria": [
        {"name": "river", "text": "Names a river."},
        {"name": "brief", "text": "Has one word."},
    ],
    "verdicts": {"river": "met", "brief": "missed"},
}


def reply(**verdicts: str) -> str:
    return json.dumps({key: {"reason": "r", "verdict": v} for key, v in verdicts.items()})


def to_trajectory_record(text: str) -> TextTrajectory:
    message = {"role": "assistant", "content": text, "raw": text}
    return TextTrajectory(messages=(message,), finish_reason="stop", sampled_tokens=1)


def written(folder: Path, *options: str, rows: tuple[dict[str, Any], ...] = (ROW,)) -> Path:
    source, out = folder / "labelled.jsonl", folder / "out.jsonl"
    source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert write_judgements([str(source), "--out", str(out), *options]) == 0
    return out


def test_agreement_with_the_labels_is_the_reward(tmp_path: Path) -> None:
    function = "keel.examples.judges.agreement"
    options = {"path": str(written(tmp_path)), "rewards": {function: 1.0}}
    source = SourceConfig(name="judge", source="jsonl", **options)  # type: ignore[arg-type]
    (item,) = load_jsonl(source, check_spec).items
    assert "Names a river." in item.prompt.messages[0]["content"]
    for text, reward in (
        (reply(c1="met", c2="missed"), 1.0),
        (reply(c1="partly", c2="missed"), 0.75),
        (reply(c1="missed", c2="met"), 0.0),
        (reply(c1="met"), 0.0),
        ("met, missed", 0.0),
    ):
        assert agreement(item.prompt, to_trajectory_record(text)) == reward, text


EVALUATED = {"prompt": "Show it.", "answer": "Clear.", "evaluation": "It is not.", "score": 0.5}


def test_meta_verifier_learns_the_scores_of_evaluations(tmp_path: Path) -> None:
    (line,) = map(json.loads, written(tmp_path, rows=(EVALUATED,)).read_text().splitlines())
    asked = meta_question([{"role": "user", "content": "Show it."}], "Clear.", "It is not.")
    assert line["messages"] == asked.messages(line["id"])
    about = {"messages": tuple(line["messages"]), "reward": {"columns": line}}
    prompt = Prompt(prompt_id="p", domain="d", **about)
    for score, reward in (("0.5", 1.0), ("1", 0.5), ("0", 0.5), ("2", 0.0)):
        text = json.dumps({"analysis": "", "score": score})
        assert agreement(prompt, to_trajectory_record(text)) == reward, score
    (tmp_path / "out.jsonl").unlink()
    chat = json.loads(written(tmp_path, "--sft", rows=(EVALUATED,)).read_text())
    assert asked.read(chat["messages"][-1]["content"]).score == 0.5
    source = tmp_path / "labelled.jsonl"
    for impossible in (1.5, 0.25, "much"):
        source.write_text(json.dumps({**EVALUATED, "score": impossible}))
        assert write_judgements([str(source), "--out", str(tmp_path / "no.jsonl"), "--sft"]) == 2


def test_conversations_end_in_the_labelled_verdicts(tmp_path: Path) -> None:
    out = written(tmp_path, "--sft", rows=({**ROW, "reasons": {"brief": "Five words."}},))
    (line,) = map(json.loads, out.read_text().splitlines())
    assert [message["role"] for message in line["messages"]] == ["system", "user", "assistant"]
    assert json.loads(line["messages"][-1]["content"]) == {
        "c1": {"reason": "", "verdict": "met"},
        "c2": {"reason": "Five words.", "verdict": "missed"},
    }


RECIPE = load_config("mixed-agents")
SHOWN = {
    source.name: (source, getattr(demonstrations, source.environment.demonstrations.split(":")[1]))
    for source in RECIPE.data.sources
    if source.environment.demonstrations
}


def shown(name: str, count: int) -> list[Demonstration]:
    source, make_them = SHOWN[name]
    return make_them(count, seed=3, arguments=source.environment.arguments)


def calls_of(messages: Any) -> list[tuple[str, dict[str, Any]]]:
    functions = [c["function"] for m in messages for c in m.get("tool_calls", ())]
    return [(one["name"], one["arguments"]) for one in functions]


@pytest.mark.parametrize("name", SHOWN)
def test_demonstrations_fit_the_recipe(name: str) -> None:
    source, _ = SHOWN[name]
    tokenizer = build_tokenizer(RECIPE.model.tiny.phrases)
    budget = RECIPE.budget(source.domain_name)
    assert shown(name, 3) == shown(name, 3)
    made = shown(name, 40)
    assert len({str(one.worked) for one in made}) > 20
    for one in made:
        for messages in (one.worked, one.hasty):
            ids, by_policy = _conversation_ids(
                tokenizer, messages, one.tools, thinking=source.thinking
            )
            assert len(ids) <= min(100, budget.window)
            turns = sum(message["role"] == "assistant" for message in messages)
            assert turns <= budget.max_turns and sum(by_policy) <= 2 * budget.max_tokens
        assert len(calls_of(one.worked)) > len(calls_of(one.hasty)) - (name == "code")
        opening = one.worked[: 2 if one.worked[0]["role"] == "system" else 1]
        assert one.hasty[: len(opening)] == opening and one.hasty != one.worked


def test_worked_answers_are_right_and_hasty_wrong() -> None:
    for one in shown("interpreter", 30):
        *_, question = (m["content"] for m in one.worked if m["role"] == "user")
        value = str(eval(question.partition(": ")[2].removesuffix(" =")))
        assert one.worked[-1]["content"] == value != one.hasty[-1]["content"]
    for one in shown("search", 30):
        document = next(m["content"] for m in one.worked if m["role"] == "tool")
        builder = one.worked[-1]["content"].removeprefix("<answer>").removesuffix("</answer>")
        assert f"{builder} built " in document and builder not in one.hasty[-1]["content"]
    for one in shown("general", 30):
        seen = [int(m["content"]) for m in one.worked if m["role"] == "tool"]
        items = [words["item"] for name, words in calls_of(one.worked) if name == "price"]
        best = str(seen[0]) if len(seen) == 1 else items[seen.index(min(seen))]
        (*_, (_, right)), ((_, wrong),) = calls_of(one.worked), calls_of(one.hasty)
        assert right["answer_text"] == best != wrong["answer_text"]
    for one in shown("code", 30):
        both = (one.worked, one.hasty)
        right, wrong = ([m["content"] for m in x if m["role"] == "tool"][-1] for x in both)
        assert right.startswith("pace.py now reads:") and "in pace.py 0 times" in wrong


def test_search_finds_the_answer(tmp_path: Path) -> None:
    demonstrations.write_towers(tmp_path / "search", 12, seed=1)
    index = ensure_index(tmp_path / "search/corpus", tmp_path / "index")
    search = Search(index=str(index), results=1)
    for line in (tmp_path / "search/tasks.jsonl").read_text().splitlines():
        task = json.loads(line)
        result = search.search(task["id"])
        assert result.endswith(f"\n   {task['answer']} built {task['id']}.")
        assert result == towers_shown(task["id"], task["answer"])


def test_program_tests_match_their_prompts(tmp_path: Path) -> None:
    demonstrations.write_programs(tmp_path / "programs", 270, seed=1)
    text = (tmp_path / "programs/tasks.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert len({one["id"] for one in lines}) == len({one["prompt"] for one in lines}) == 270
    for one in lines:
        expected = one["prompt"].partition("print n ")[2].removesuffix(".")
        for test in one["tests"]:
            n = int(test["stdin"])
            assert test["stdout"] == f"{eval(f'({n}) {expected}')}\n"
        assert len({test["stdout"] for test in one["tests"]}) == len(one["tests"])


def test_lessons_follow_their_first_thought(tmp_path: Path) -> None:
    demonstrations.write_lessons(tmp_path / "lessons", 40, seed=1)
    files = sorted(path.stem for path in (tmp_path / "lessons").iterdir())
    plain = ["code", "coding", "general", "search"]
    assert files == sorted([*plain, *(f"{name}-direct" for name in plain)])
    for name in files:
        path = tmp_path / "lessons" / f"{name}.jsonl"
        source = ConversationsConfig(name=name, source="jsonl", path=str(path))
        read = read_conversations(source).examples
        assert len(read) == 40 and all(one.thinking == ("direct" not in name) for one in read)
        thoughts = [one.messages[one.trained[0]].get("reasoning_content") for one in read]
        if "direct" in name:
            assert set(thoughts) == {None}
            continue
        assert set(thoughts) == {demonstrations.LOOK, demonstrations.GUESS}
        worked = [thought == demonstrations.LOOK for thought in thoughts]
        if name == "code":
            formulas = [one.messages[0]["content"].split("print n ")[1][:-1] for one in read]
            outputs = [one.messages[1]["content"] for one in read]
            pairs = zip(formulas, outputs, strict=True)
            right = [f"int(input()){a.replace(' ', '')})" in b for a, b in pairs]
        else:  # worked lessons look the answer up first
            first = {"general": "price", "search": "search", "coding": "view"}[name]
            right = [(calls_of(one.messages) or [("", {})])[0][0] == first for one in read]
        assert right == worked, name


def towers_shown(tower: str, builder: str) -> str:
    library = demonstrations._OneDocument(demonstrations._tower_document(tower, builder))
    return Search(ready=library, results=1).search(tower)


@pytest.mark.e2e
def test_code_demonstration_matches_the_real_environment(tmp_path: Path) -> None:
    wrap = wrap_of()
    assert make(tmp_path, general=2, search=2, code=1, programs=2, lessons=2, seed=0) == 0
    task = json.loads((tmp_path / "code/tasks.jsonl").read_text())
    folder = tmp_path / "code/environment"
    target, where = "keel.agents.environments.code.environment:Repository", {"folder": str(folder)}
    program = EnvironmentProgram(target=target, folder=folder, arguments=where, sandbox=wrap)
    asked = ({"role": "user", "content": task["prompt"]},)
    prompt = Prompt(prompt_id="code/0", domain="code", messages=asked, reward=task["reward"])
    expected = task["prompt"].partition("pace() should be ")[2][:2]

    async def played() -> None:
        hosted = ProcessEnvironment(program)
        try:
            opening = await hosted.open(prompt, seed=1)
            (one,) = shown("code", 1)
            assert list(opening.tools) == list(one.tools)
            prompt_text, issue = one.worked[0]["content"], task["prompt"]
            assert prompt_text.partition("should be ")[0] == issue.partition("should be ")[0]
            viewed, edited = (m["content"] for m in one.worked if m["role"] == "tool")
            view = ToolCall(call_id="c", name="view", arguments={"path": "pace.py"})
            seen = (await hosted.call(view, timeout_s=60)).text
            is_now = seen.split()[-1]
            assert seen.removesuffix(is_now) == viewed[:-2]
            change = {"path": "pace.py", "old": is_now, "new": expected}
            edit = ToolCall(call_id="c", name="edit", arguments=change)
            assert (await hosted.call(edit, timeout_s=60)).text[:-2] == edited[:-2]
            verdict = await hosted.verdict((), "stop")
            assert isinstance(verdict, Verdict) and verdict.parts == {"correct": 1.0}
        finally:
            await hosted.close()

    asyncio.run(asyncio.wait_for(played(), 300))
