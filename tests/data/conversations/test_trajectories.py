"""Trajectories of runs and evaluations as conversations."""

import json
from pathlib import Path
from typing import Any

import pytest

from keel.configs.schema import ConfigError
from tests.data.conversations.sources import chat, load, said, source, write


@pytest.mark.parametrize("ascii", [True, False])
def test_surrogates_are_replaced(tmp_path: Path, ascii: bool) -> None:
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
    with pytest.raises(ConfigError, match=r"samples\.jsonl:1: "):
        load(source(str(path)))


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
    assert (report.learned, report.sampled, report.unread) == (3, 2, frozenset())
    assert report.left_out == {"reward below 1": 1, "cut off": 1}
    tokens = [lesson.segments[0].token_ids_T.tolist() for lesson in found.train.sources["s"]]
    assert sorted(tokens) == [[7, 8, 9], [7, 8, 9], [ord(letter) for letter in "b1?b1"]]
    found = load(source(str(run), most_per_prompt=1, cut=True, **knobs))
    assert found.report["s"].learned == 3
    assert found.report["s"].left_out == {"reward below 1": 1, "beyond 1 of a prompt": 1}
    assert (
        load(source(str(run), reward="reward", least_reward=0.5, **knobs)).report["s"].learned == 3
    )
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
