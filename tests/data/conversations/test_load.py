"""Conversations: sources, the held-out split, and trajectories of runs and evaluations."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from keel.configs.schema import ConfigError, ConversationsConfig
from keel.data.conversations.forms import Example
from keel.data.conversations.load import SftData
from tests.data.conversations.sources import chat, load, said, source, write


def test_duplicates_and_questions(tmp_path: Path) -> None:
    lines = [chat(f"q{i // 2}?", f"answer {i}") for i in range(20)]
    path = write(tmp_path / "a.jsonl", *lines, lines[0], "", chat("q0?", "other", score=1))
    found = load(source(path, holdout=5))
    report = found.report["s"]
    assert report.left_out == {"repeated": 1}
    assert report.heldout in (6, 7) and report.learned + report.heldout == 21
    held, learned = said(found.heldout["s"]), said(found.train.sources["s"])
    asked = [{int(one.split()[1]) // 2 for one in part - {"other"}} for part in (held, learned)]
    assert not asked[0] & asked[1] and ("other" in held) == (0 in asked[0])
    again = load(source(path, holdout=5))
    assert said(again.heldout["s"]) == held
    assert again.train.position() == found.train.position()


def test_held_out_questions_of_all_sources(tmp_path: Path) -> None:
    one = write(tmp_path / "a.jsonl", *(chat(f"q{i}?", f"a{i}") for i in range(6)))
    two = write(tmp_path / "b.jsonl", *(chat(f" q{i}? ", f"b{i}") for i in range(6)))
    found = load(source(one, holdout=2), source(two, name="t"))
    held = {answer[1:] for answer in said(found.heldout["s"])}
    assert said(found.train.sources["t"]) == {f"b{i}" for i in range(6) if str(i) not in held}
    assert found.report["t"].left_out == {"held out by another source": 2}
    messages = tuple(chat("q3?", "")["messages"])
    reserved = Example(origin="", messages=messages, trained=(1,), thinking=False).question
    found = load(source(one), reserved={reserved})
    assert "a3" not in said(found.train.sources["s"])
    assert found.report["s"].left_out == {"held out by data.sources": 1}


@pytest.mark.parametrize(
    ("sizes", "holdout", "held"),
    [([9, 1], 1, 1), ([9, 3, 3], 3, 3), ([4, 5, 6], 3, 4), ([3, 5], 4, 5), ([3, 5], 3, 3)],
)
def test_holdout_takes_whole_questions(
    tmp_path: Path, sizes: list[int], holdout: int, held: int
) -> None:
    lines = [chat(f"q{q}?", f"{q} {i}") for q, size in enumerate(sizes) for i in range(size)]
    found = load(source(write(tmp_path / "a.jsonl", *lines), holdout=holdout))
    report = found.report["s"]
    assert (report.heldout, report.learned) == (held, sum(sizes) - held)
    both = said(found.heldout["s"]), said(found.train.sources["s"])
    asked = [{one.split()[0] for one in part} for part in both]
    assert not asked[0] & asked[1]


def test_worked_solutions(tmp_path: Path) -> None:
    made = ConversationsConfig(name="s", source="solutions", task="spell_backward", size=20)
    found = load(made)
    report = found.report["s"]
    assert 0 < report.learned < 20 and report.left_out["not taught"] + report.learned <= 20
    assert not any("a" in answer for answer in said(found.train.sources["s"]))

    def with_params(**params: Any) -> set[str]:
        made = {"task": "spell_backward", "size": 20, "params": params, "path": ""}
        return said(load(source(source="solutions", **made)).train.sources["s"])

    assert with_params() == said(found.train.sources["s"])
    assert with_params(seed=3) == with_params(seed=3) != with_params()
    with pytest.raises(ConfigError, match=r"sft\.sources\[s\]\.params = "):
        with_params(size=3)


COLUMNS = {"prompt": "instruction", "completion": "out.text"}


def loaded(path: str, kind: Any = "file", **knobs: Any) -> SftData:
    return load(ConversationsConfig(name="told", source=kind, path=path, **knobs))


def texts(examples: SftData) -> list[str]:
    streamed = examples.train.sources["told"]
    return sorted("".join(map(chr, one.segments[0].token_ids_T)) for one in streamed)


def test_tables_and_columns(tmp_path: Path) -> None:
    rows = [chat("1+1?", "2"), chat("2+2?", "4")]
    rows[0]["messages"][0]["name"] = None
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "objects.parquet")
    as_json = [{"messages": json.dumps(row["messages"]), "id": None} for row in rows]
    pq.write_table(pa.Table.from_pylist(as_json), tmp_path / "json.parquet")
    (tmp_path / "pairs.csv").write_text("prompt,completion\n1+1?,2\n2+2?,4\n")
    pairs = (("1+1?", "2"), ("2+2?", "4"))
    named = [{"instruction": asked, "out": {"text": told}} for asked, told in pairs]
    write(tmp_path / "named.jsonl", *named)
    for name in ("objects.parquet", "json.parquet", "pairs.csv"):
        assert texts(loaded(str(tmp_path / name))) == ["1+1?2", "2+2?4"], name
    dialogues = [{"dialogue": row["messages"]} for row in as_json]
    pq.write_table(pa.Table.from_pylist(dialogues), tmp_path / "other.parquet")
    other = loaded(str(tmp_path / "other.parquet"), columns={"messages": "dialogue"})
    assert texts(other) == ["1+1?2", "2+2?4"]
    for kind in ("file", "jsonl"):
        found = loaded(str(tmp_path / "named.jsonl"), kind, columns=COLUMNS)
        assert texts(found) == ["1+1?2", "2+2?4"]


def trajectory(name: str, correct: float, tokenizer: str = "mine", **more: Any) -> dict[str, Any]:
    segments = [{"ids": [7, 8, 9], "said": [[1, 3]]}]
    return {
        **chat(f"{name}?", name),
        **{"id": f"p/{name[0]}", "domain": "d", "step": 1, "finish_reason": "stop"},
        **{"reward": correct - 0.1, "parts": {"correct": correct}},
        **{"tokenizer": tokenizer, "segments": segments, **more},
    }


def test_selection_and_tokens(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write(
        run / "trajectories" / "step_000001.jsonl",
        trajectory("a1", 1.0),
        trajectory("a2", 0.0),
        trajectory("b1", 1.0, tokenizer="another"),
        trajectory("c1", 1.0, finish_reason="length"),
    )
    write(run / "trajectories" / "step_000002.jsonl", trajectory("a3", 1.0))
    unpacked = run / "trajectories" / "step_000001.tokens.jsonl"  # of what `keel report` reads
    unpacked.write_text('{"prompt": "p", "messages": [], "trajectories": []}\n')
    knobs = {"source": "trajectories"}
    found = load(source(str(run), **knobs))
    report = found.report["s"]
    assert (report.learned, report.sampled) == (3, 2)
    assert report.left_out == {"reward below 1": 1, "cut off": 1}
    tokens = [example.segments[0].token_ids_T.tolist() for example in found.train.sources["s"]]
    assert sorted(tokens) == [[7, 8, 9], [7, 8, 9], [ord(letter) for letter in "b1?b1"]]
    found = load(source(str(run), most_per_prompt=1, cut=True, **knobs))
    assert found.report["s"].learned == 3
    assert found.report["s"].left_out == {"reward below 1": 1, "beyond 1 of a prompt": 1}
    found = load(source(str(run), reward="reward", least_reward=0.5, **knobs))
    assert found.report["s"].learned == 3
    with pytest.raises(ConfigError, match=r"step_000001\.jsonl:1: .*`style`"):
        load(source(str(run), reward="style", **knobs))


def test_most_per_prompt_counts_learned_ones(tmp_path: Path) -> None:
    def of(prompt: str, said: str) -> dict[str, Any]:
        return {**trajectory(prompt, 1.0, tokenizer="another"), **chat(f"{prompt}?", said)}

    same = [of("a", "same"), of("a", "same"), of("a", "other"), of("a", "third")]
    lines = [of("b", "x" * 50), of("b", "untellable"), of("b", "short"), *same, of("c", "last")]
    path = write(tmp_path / "step.jsonl", *lines)
    drop = {"long_conversations": "drop", "max_context_tokens": 40}
    knobs = {"source": "trajectories", "most_per_prompt": 2, "on_bad_line": "skip"}
    found = load(source(path, **knobs), **drop)
    assert said(found.train.sources["s"]) == {"short", "same", "other", "last"}
    left = {"malformed": 1, "repeated": 1, "beyond 2 of a prompt": 1, "too long": 1}
    assert found.report["s"].left_out == left
    found = load(source(path, size=3, **knobs), **drop)
    assert said(found.train.sources["s"]) == {"short", "same", "other"}


def test_changed_prompts_are_rendered_again(tmp_path: Path) -> None:
    path = write(tmp_path / "step.jsonl", trajectory("a1", 1.0, thinking=False))
    for knobs in ({}, {"thinking": "without"}, {"thinking": "with"}, {"system": "Be brief."}):
        found = load(source(path, source="trajectories", **knobs))
        assert found.report["s"].sampled == (knobs in ({}, {"thinking": "without"})), knobs


def test_held_out_prompts_are_not_learned(tmp_path: Path) -> None:
    lines = [trajectory(name, 1.0) for name in ("a1", "b1", "b2")]  # of p/a, p/b, p/b
    path = write(tmp_path / "step.jsonl", *lines)
    found = load(source(path, source="trajectories"), reserved_ids={"p/b"})
    assert found.report["s"].learned == 1
    assert found.report["s"].left_out == {"held out by data.sources": 2}
    # In other sources, ids are arbitrary.
    path = write(tmp_path / "a.jsonl", chat("?", "a", id="p/b"))
    assert load(source(path), reserved_ids={"p/b"}).report["s"].learned == 1


def test_evaluations(tmp_path: Path) -> None:
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
