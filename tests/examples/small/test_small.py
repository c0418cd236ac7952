"""The small tasks and their demonstrations."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from keel.agents.env_process.client import Hosted
from keel.agents.env_process.program import Program
from keel.agents.environments.demonstrations import Demonstration
from keel.agents.environments.search.environment import Search
from keel.agents.types import Transcript
from keel.configs.load import load_config
from keel.configs.schema import ConversationsConfig
from keel.data.conversations.files import read_rows
from keel.examples.small import demonstrations, lessons, programs, towers
from keel.examples.small.__main__ import make
from keel.model.tiny.demonstrations import conversation_ids
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import ToolCall
from keel.rl.types import Prompt, Verdict
from tests.agents.sandboxes import wrap_of

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
            ids, by_policy = conversation_ids(
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
    towers.write(tmp_path / "search", 12, seed=1)
    search = Search(corpus=str(tmp_path / "search/corpus"), index=str(tmp_path / "i"), results=1)
    for line in (tmp_path / "search/tasks.jsonl").read_text().splitlines():
        task = json.loads(line)
        result = search.search(task["id"])
        assert result.endswith(f"\n   {task['answer']} built {task['id']}.")
        assert result == towers_shown(task["id"], task["answer"])


def test_program_tests_match_their_prompts(tmp_path: Path) -> None:
    programs.write(tmp_path / "programs", 270, seed=1)
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
    lessons.write(tmp_path / "lessons", 40, seed=1)
    files = sorted(path.stem for path in (tmp_path / "lessons").iterdir())
    plain = ["code", "coding", "general", "search"]
    assert files == sorted([*plain, *(f"{name}-direct" for name in plain)])
    for name in files:
        path = tmp_path / "lessons" / f"{name}.jsonl"
        source = ConversationsConfig(name=name, source="jsonl", path=str(path))
        read = read_rows(source).examples
        assert len(read) == 40 and all(one.thinking == ("direct" not in name) for one in read)
        thoughts = [one.messages[one.trained[0]].get("reasoning_content") for one in read]
        if "direct" in name:
            assert set(thoughts) == {None}
            continue
        assert set(thoughts) == {lessons.LOOK, lessons.GUESS}
        worked = [thought == lessons.LOOK for thought in thoughts]
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
    library = demonstrations._OneDocument(towers.document(tower, builder))
    return Search(ready=library, results=1).search(tower)


@pytest.mark.e2e
def test_code_demonstration_matches_the_real_environment(tmp_path: Path) -> None:
    wrap = wrap_of()
    assert make(tmp_path, general=2, search=2, code=1, programs=2, lessons=2, seed=0) == 0
    task = json.loads((tmp_path / "code/tasks.jsonl").read_text())
    folder = tmp_path / "code/environment"
    target, where = "keel.agents.environments.code.environment:Repository", {"folder": str(folder)}
    program = Program(target=target, folder=folder, arguments=where, wrap=wrap)
    asked = ({"role": "user", "content": task["prompt"]},)
    prompt = Prompt(prompt_id="code/0", domain="code", messages=asked, reward=task["reward"])
    expected = task["prompt"].partition("pace() should be ")[2][:2]

    async def played() -> None:
        hosted = Hosted(program)
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
            verdict = await hosted.verdict(Transcript(messages=(), finish_reason="stop"))
            assert isinstance(verdict, Verdict) and verdict.parts == {"correct": 1.0}
        finally:
            await hosted.close()

    asyncio.run(asyncio.wait_for(played(), 300))
