"""Token files contain the right tokens and numbers, within the budget."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import RunConfig
from keel.rl.types import ScoredGroup, TokenNumbers
from keel.trainer.run.trajectory_files import TokenFile, TokenTexts
from tests.rl.rollouts import kept_of, logp_old_of, scored, segment, trajectory


class Bytes:
    """A tokenizer whose token ids are bytes."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], **_: Any) -> str:
        return bytes(ids).decode(errors="replace")


def group(first: int, rewards: list[float], tokens: int = 6) -> ScoredGroup:
    answers = [
        trajectory(segment(first + 10 * i, tokens, context=2, kept=True, version=3), sibling=i)
        for i in range(len(rewards))
    ]
    return scored(answers, rewards, parts=[{"correct": reward} for reward in rewards])


def run(**knobs: Any) -> RunConfig:
    return RunConfig(dir="d", **knobs)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


@pytest.mark.parametrize("text", ["plain words, ½ and “quotes”", "日本語 🙂🙂", "a\n\tb", "é"])
def test_token_texts_join_to_the_text(text: str) -> None:
    ids = list(text.encode())
    texts = TokenTexts(Bytes()).texts(ids)
    assert "".join(texts) == text and len(texts) == len(ids)
    cut = TokenTexts(Bytes()).texts(list("🙂".encode())[:3])  # in the middle of a character
    assert cut == ["", "", "\N{REPLACEMENT CHARACTER}"]


def test_tokens_have_their_own_numbers(tmp_path: Path) -> None:
    one = group(40, [1, 0, 0.5])
    one = replace(one, notes_G=({"c1": "1: good"}, {}, {}))
    now = np.full(6, np.nan, np.float32)
    now[2:] = [logp_old_of(token) + 0.1 for token in range(42, 46)]
    overlap = np.array([np.nan, 1, 0.5, 1, np.nan, 0.25], np.float32)
    config = run(save_trajectories=2, save_tokens=12)
    numbers = {0: TokenNumbers(logp_T=now, overlap_T=overlap)}
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    TokenFile(config, TokenTexts(Bytes()), lambda: numbers).write(path, [one])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    (line,) = read(path)
    best, worst, summed_up = line["trajectories"]
    context, sampled = best["contexts"][0]
    assert (context, sampled["text"]) == ("()", list("*+,-"))
    ids = range(42, 46)
    assert sampled["logp"] == pytest.approx([logp_old_of(token) for token in ids], abs=1e-4)
    assert sampled["ratio"] == pytest.approx([np.exp(0.1)] * 4, abs=1e-4)
    assert sampled["overlap"] == [0.5, 1, None, 0.25]
    assert sampled["kept"] == [len(kept_of(token)) for token in ids]
    assert sampled["version"] == [3] * 4
    assert best["notes"] == {"c1": "1: good"} and best["parts"] == {"correct": 1}
    # The trainer has no numbers for the second; the third exceeds the budget.
    assert set(worst["contexts"][0][1]) == {"text", "logp", "kept", "version"}
    assert "contexts" not in summed_up and "messages" not in summed_up
    assert summed_up["reward"] == 0.5 and summed_up["tokens"] == 4


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ({"answer": 7}, "7"),
        ({"entry": {"answer": "a b"}, "kind": "reasoning_gym"}, "a b"),
        ({"entry": {"answer": None}}, ""),
        ({"tests": "assert f(1)"}, ""),
    ],
)
def test_answer_and_reference_are_saved(
    tmp_path: Path, reward: dict[str, Any], expected: str
) -> None:
    one = group(40, [1, 0])
    prompt = replace(one.group.prompt, reward=reward)
    one = replace(one, group=replace(one.group, prompt=prompt))
    path = tmp_path / "step_000001.tokens.jsonl.gz"
    numbered = TokenFile(run(), TokenTexts(Bytes()), dict, lambda one: f"answer {one.sibling}")
    numbered.write(path, [one])
    (line,) = read(path)
    assert line["reference"] == expected
    assert [one["answer"] for one in line["trajectories"]] == ["answer 0", "answer 1"]
