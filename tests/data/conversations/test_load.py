"""Sources of conversations: files, what runs have sampled, worked solutions; and the split."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from keel.configs.schema import ConfigError, ConversationsConfig, SftConfig
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.types import Example
from keel.rl.supervised.lessons import shown
from keel.rl.types import Segment
from tests.data.rows.hub import MAIN, NAME, serving


def chat(asked: str, said: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
    return {"messages": messages, **more}


def write(path: Path, *records: Mapping[str, Any] | str) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [one if isinstance(one, str) else json.dumps(one) for one in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return str(path)


def letters(example: Example) -> list[Segment]:
    """Every letter is a token, and the last message is learned."""
    if "untellable" in str(example.messages):
        raise ValueError("the template has no word for it")
    said = str(example.messages[-1]["content"])
    asked = "".join(str(m["content"]) for m in example.messages[:-1])
    ids = [ord(letter) for letter in asked + said]
    return [shown(example.origin, ids, [i >= len(asked) for i in range(len(ids))])]


def solve(task: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    if task != "spell_backward" or "a" in entry["answer"]:
        return None
    return {"role": "assistant", "content": entry["answer"], "reasoning_content": "letters"}


def load(
    *sources: ConversationsConfig,
    reserved: Collection[str] = (),
    reserved_ids: Collection[str] = (),
    **config: Any,
) -> Lessons:
    return load_lessons(
        SftConfig(sources=sources, **config),
        seed=0,
        render=letters,
        solve=solve,
        tokenizer="mine",
        reserved=reserved,
        reserved_ids=reserved_ids,
    )


def source(path: str, **knobs: Any) -> ConversationsConfig:
    return ConversationsConfig(**{"name": "s", "source": "jsonl", "path": path, **knobs})


def said(lessons: Any) -> set[str]:
    return {
        "".join(chr(int(token)) for token in lesson.segments[0].token_ids_T[one.trainable_T])
        for lesson in lessons
        for one in lesson.segments[:1]
    }


def test_conversations_are_kept_once_and_questions_are_not_split(tmp_path: Path) -> None:
    lines = [chat(f"q{i // 2}?", f"answer {i}") for i in range(20)]
    path = write(tmp_path / "a.jsonl", *lines, lines[0], "", chat("q0?", "other", score=1))
    found = load(source(path, holdout=5))
    report = found.report["s"]
    assert report.left_out == {"repeated": 1} and report.unread == {"score"}
    assert report.heldout in (6, 7) and report.learned + report.heldout == 21
    held, learned = said(found.heldout["s"]), said(found.train.sources["s"])
    questions = [
        {int(one.split()[1]) // 2 if one != "other" else 0 for one in part}
        for part in (held, learned)
    ]
    assert not questions[0] & questions[1]
    again = load(source(path, holdout=5))
    assert said(again.heldout["s"]) == held
    assert again.train.state() == found.train.state(), "the same in every start"


def test_a_question_held_out_anywhere_is_learned_nowhere(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"q{i}?", f"a{i}") for i in range(6)))
    two = write(tmp_path / "b.jsonl", *(chat(f" q{i}? ", f"b{i}") for i in range(6)))
    found = load(source(one, holdout=2), source(two, name="t"))
    held = {answer[1:] for answer in said(found.heldout["s"])}
    assert said(found.train.sources["t"]) == {f"b{i}" for i in range(6) if str(i) not in held}
    assert found.report["t"].left_out == {"held out by another source": 2}
    (question,) = {
        Example(
            origin="",
            messages=tuple(chat("q3?", "")["messages"]),
            trained=(1,),
            thinking=False,
        ).question
    }
    found = load(source(one), reserved={question})
    assert "a3" not in said(found.train.sources["s"])
    assert found.report["s"].left_out == {"held out by data.sources": 1}


@pytest.mark.parametrize("ascii", [True, False])
def test_half_a_surrogate_pair_in_a_trajectory_costs_no_other(tmp_path: Path, ascii: bool) -> None:
    samples = [
        {
            "correct": 1.0,
            "messages": [{"role": "assistant", "content": said}],
            "record": {"id": "a/1", "asked": [{"role": "user", "content": "?"}]},
        }
        for said in ("\ud800 half", "whole \U0001f600")
    ]
    line = json.dumps({"samples": samples}, ensure_ascii=ascii) + "\n"
    path = tmp_path / "samples.jsonl"
    path.write_bytes(line.encode("utf-8", "surrogatepass"))
    found = load(source(str(path), source="trajectories"))
    assert said(found.train.sources["s"]) == {"\ufffd half", "whole \U0001f600"}
    path.write_text(json.dumps(chat("?", "\ud800")) + "\n")
    with pytest.raises(ConfigError, match="half of a surrogate pair"):  # somebody wrote it
        load(source(str(path)))


def test_repeat_weighs_sources_by_how_often_each_conversation_is_seen(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"q{i}?", f"a{i}") for i in range(4)))
    two = write(tmp_path / "b.jsonl", *(chat(f"p{i}?", f"b{i}") for i in range(8)))
    three = write(tmp_path / "c.jsonl", chat("r?", "c"))
    held = source(three, name="only held out", repeat=0, holdout=1)
    found = load(source(one, repeat=2), source(two, name="t"), held)
    assert list(found.train.sources) == ["s", "t"] and list(found.heldout) == ["only held out"]
    found.train.take(16)
    assert found.train.drawn == {"s": 8, "t": 8}


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("{", "not JSON"),
        ('{"messages": []}', "`messages` must be a list of at least one message"),
        (
            json.dumps(chat("?", "untellable")),
            "the template has no word for it .*thinking: without",
        ),
    ],
)
def test_a_bad_line_is_named_or_left_out(tmp_path: Path, line: str, named: str) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), line)
    with pytest.raises(ConfigError, match=rf"a\.jsonl:2: {named}.*on_bad_line: skip"):
        load(source(path))
    found = load(source(path, on_bad_line="skip"))
    (reason,) = found.report["s"].skipped
    assert reason.startswith(f"{path}:2: ") and found.report["s"].left_out == {"malformed": 1}


def test_long_conversations_are_named_or_dropped(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), chat("?", "b" * 50))
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 has 51 tokens, more than .* = 40"):
        load(source(path), max_context_tokens=40)
    found = load(source(path), max_context_tokens=40, long_conversations="drop")
    assert found.report["s"].left_out == {"too long": 1}


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"path": "absent.jsonl"}, r"sft\.sources\[s\]\.path = .*no such file"),
        ({"holdout": 2}, r"no conversation is left to learn from \(it is empty; 2 held out"),
        ({"holdout": 3}, r"holdout = 3: there are only 2 usable conversations"),
        ({"source": "trajectories"}, "is no trajectory"),
        ({"source": "solutions", "path": "", "task": "chain_sum", "size": 2}, "nobody has worked"),
        ({"source": "solutions", "path": "", "task": "no_such", "size": 2}, "reasoning_gym's no_s"),
    ],
)
def test_a_source_that_teaches_nothing(tmp_path: Path, knobs: dict[str, Any], named: str) -> None:
    path = write(tmp_path / "a.jsonl", chat("?", "a"), chat("!", "b"))
    with pytest.raises(ConfigError, match=named):
        load(source(knobs.pop("path", path), **knobs))


def trajectory(name: str, correct: float, tokenizer: str = "mine", **more: Any) -> dict[str, Any]:
    segments = [{"ids": [7, 8, 9], "said": [[1, 3]]}]
    return {
        **chat(f"{name}?", name),
        **{"id": f"p/{name[0]}", "domain": "d", "step": 1, "finish_reason": "stop"},
        **{"reward": correct - 0.1, "parts": {"correct": correct}},
        **{"tokenizer": tokenizer, "segments": segments, **more},
    }


def test_trajectories_are_chosen_by_their_worth_and_keep_their_tokens(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(
        run / "trajectories" / "step_000001.jsonl",
        trajectory("a1", 1.0),
        trajectory("a2", 0.0),
        trajectory("b1", 1.0, tokenizer="another"),
        trajectory("c1", 1.0, finish_reason="length"),
    )
    write(run / "trajectories" / "step_000002.jsonl", trajectory("a3", 1.0))
    knobs = {"source": "trajectories"}
    found = load(source(str(run), **knobs))
    report = found.report["s"]
    assert (report.learned, report.sampled, report.unread) == (3, 2, frozenset())
    assert report.left_out == {"worth less than 1": 1, "cut off": 1}
    tokens = [lesson.segments[0].token_ids_T.tolist() for lesson in found.train.sources["s"]]
    assert sorted(tokens) == [[7, 8, 9], [7, 8, 9], [ord(letter) for letter in "b1?b1"]]
    found = load(source(str(run), most_per_prompt=1, cut=True, **knobs))
    assert found.report["s"].left_out == {"worth less than 1": 1, "beyond 1 of a prompt": 1}
    assert (
        load(source(str(run), reward="reward", least_reward=0.5, **knobs)).report["s"].learned == 3
    )
    with pytest.raises(ConfigError, match=r"step_000001\.jsonl:1: has no `style`.*correct"):
        load(source(str(run), reward="style", **knobs))
    with pytest.raises(ConfigError, match="holds no trajectories; name the folder of a run"):
        load(source(str(tmp_path), **knobs))


@pytest.mark.parametrize(
    ("knobs", "written_again"),
    [
        ({}, False),
        ({"thinking": "without"}, False),
        ({"thinking": "with"}, True),
        ({"system": "Be brief."}, True),
    ],
)
def test_what_is_asked_for_in_another_way_than_it_was_sampled_is_written_again(
    tmp_path: Path, knobs: dict[str, Any], written_again: bool
) -> None:
    path = write(tmp_path / "step.jsonl", trajectory("a1", 1.0, thinking=False))
    found = load(source(path, source="trajectories", **knobs))
    assert found.report["s"].sampled == (not written_again)


def test_ids_are_taken_from_trajectories_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", trajectory("a1", 0.0, tokenizer="another"))
    found = load(source(path))
    report = found.report["s"]
    assert (report.learned, report.sampled) == (1, 0) and "segments" in report.unread
    for knob in ({"least_reward": 0.5}, {"reward": "style"}, {"cut": True}, {"most_per_prompt": 1}):
        (name,) = knob
        with pytest.raises(ConfigError, match=rf"{name} = .* is for source: trajectories alone"):
            source(path, **knob)


def test_a_trajectory_of_a_prompt_that_is_held_out_is_not_learned(tmp_path: Path) -> None:
    lines = [trajectory(name, 1.0) for name in ("a1", "b1", "b2")]  # of p/a, p/b, p/b
    path = write(tmp_path / "step.jsonl", *lines)
    found = load(source(path, source="trajectories"), reserved_ids={"p/b"})
    assert found.report["s"].learned == 1
    assert found.report["s"].left_out == {"held out by data.sources": 2}
    # A line that somebody wrote has a name of its own choosing.
    path = write(tmp_path / "a.jsonl", chat("?", "a", id="p/b"))
    assert load(source(path), reserved_ids={"p/b"}).report["s"].learned == 1


def test_an_evaluation_is_learned_from_by_its_completions(tmp_path: Path) -> None:
    sample = {"correct": 1.0, "tokens": 2, "messages": [{"role": "assistant", "content": "4"}]}
    record = {
        **{"id": "p/1", "finish_reason": "stop", "thinking": False, "tokenizer": "another"},
        **{"asked": [{"role": "user", "content": "2+2?"}]},
    }
    line = {"variant": "recipe", "id": "p/1", "samples": [{**sample, "record": record}]}
    folder = tmp_path / "eval"
    write(folder / "samples.jsonl", line)
    found = load(source(str(folder), source="trajectories"))
    assert said(found.train.sources["s"]) == {"4"}
    write(folder / "samples.jsonl", {**line, "samples": [sample]})
    with pytest.raises(ConfigError, match=r"samples\.jsonl:1: is of an evaluation by an older"):
        load(source(str(folder), source="trajectories"))


def test_worked_solutions_are_made_from_the_seed(tmp_path: Path) -> None:
    made = ConversationsConfig(name="s", source="solutions", task="spell_backward", size=20)
    found = load(made)
    report = found.report["s"]
    assert 0 < report.learned < 20 and report.left_out["not taught"] + report.learned <= 20
    assert not any("a" in answer for answer in said(found.train.sources["s"]))


COLUMNS = {"prompt": "instruction", "completion": "out.text"}


def told(path: str, kind: Any = "file", **knobs: Any) -> Lessons:
    return load(ConversationsConfig(name="told", source=kind, path=path, **knobs))


def texts(lessons: Lessons) -> list[str]:
    streamed = lessons.train.sources["told"]
    return sorted("".join(map(chr, one.segments[0].token_ids_T)) for one in streamed)


def test_tables_and_other_columns_are_conversations_too(tmp_path: Path) -> None:
    """Parquet fills rows up with nulls, and may have messages as objects or as JSON."""
    rows = [chat("1+1?", "2"), chat("2+2?", "4")]
    rows[0]["messages"][0]["name"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "objects.parquet")
    as_json = [{"messages": json.dumps(row["messages"]), "id": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_json), tmp_path / "json.parquet")
    (tmp_path / "pairs.csv").write_text("prompt,completion\n1+1?,2\n2+2?,4\n")
    named = [
        {"instruction": "1+1?", "out": {"text": "2"}},
        {"instruction": "2+2?", "out": {"text": "4"}},
    ]
    write(tmp_path / "named.jsonl", *named)
    for name in ("objects.parquet", "json.parquet", "pairs.csv"):
        assert texts(told(str(tmp_path / name))) == ["1+1?2", "2+2?4"], name
    dialogues = [{"dialogue": row["messages"]} for row in as_json]
    pq.write_table(pa.Table.from_pylist(dialogues), tmp_path / "other.parquet")
    other = told(str(tmp_path / "other.parquet"), columns={"messages": "dialogue"})
    assert texts(other) == ["1+1?2", "2+2?4"]
    for kind in ("file", "jsonl"):
        found = told(str(tmp_path / "named.jsonl"), kind, columns=COLUMNS)
        assert texts(found) == ["1+1?2", "2+2?4"]
        assert found.report["told"].unread == {"out"}


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"promt": "instruction"}, r"sft.sources\[told\].columns.promt: .*did you mean prompt\?"),
        (
            {"prompt": "instruction", "completion": "output"},
            r"told\].columns.completion = 'output': .*named.jsonl has no such column, it has instr",
        ),
        (
            {},
            r"its first row has none of messages, .*instruction, out\. Say .*: sft.sources\[told\]"
            r".columns: \{prompt: instruction, completion: COLUMN\}",
        ),
    ],
)
def test_a_column_that_is_not_there_is_named(
    columns: dict[str, str], said: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "named.jsonl", {"instruction": "1+1?", "out": "2"})
    with pytest.raises(ConfigError, match=said):
        told(path, columns=columns)
    with pytest.raises(ConfigError, match=r"sft.sources\[told\].path = .*no such file"):
        told(str(tmp_path / "names.jsonl"))


def test_a_dataset_of_the_hub_is_learned_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b'{"prompt": "1+1?", "completion": "2"}\n'
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(monkeypatch, {MAIN: {"train.jsonl": content}}):
        assert texts(told(NAME, "hub")) == ["1+1?2"]
        with pytest.raises(ConfigError, match=r"sft.sources\[told\].path = .*owner/sums"):
            told(NAME, "hub", split="test")
