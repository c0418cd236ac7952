"""Tests the conversion of prompts to ids, of text to messages, and of recordings to segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.types import SamplingMasks
from keel.rollout.engine.conversion import decode_all, sibling_seed, split_message
from keel.rollout.engine.jobs import build_segment


@pytest.mark.parametrize(
    ("raw", "opened", "content", "reasoning"),
    [
        ("<think>\n2+2\n</think>\n\n4", False, "4", "2+2"),
        ("2+2\n</think>\n\n4", True, "4", "2+2"),
        ("<think>2+2</think>4", True, "4", "2+2"),
        ("<think>2+2 is 4", False, "", "2+2 is 4"),
        ("4 <think>or 5", False, "", "4 or 5"),
        ("<think>a</think>4<think>b</think>", False, "4", "a\nb"),
        ("<think>a</think>4<think>b", False, "", "a4b"),
        ("<think>a<think>b</think>4", False, "4", "a<think>b"),
        ("a</think>4</think>5", True, "4</think>5", "a"),
        ("</think>4", False, "</think>4", None),
        ("", True, "", None),
    ],
)
def test_text_is_split_into_reasoning_and_content(
    raw: str, opened: bool, content: str, reasoning: str | None
) -> None:
    message = split_message(raw, thinking=opened)
    assert message["content"] == content and message.get("reasoning_content") == reasoning
    assert message["raw"] == raw and message["role"] == "assistant"


@pytest.mark.parametrize("clean_up", [False, True])
def test_batch_decoding_equals_decoding_one_by_one(clean_up: bool) -> None:
    tokenizer: Any = build_tokenizer()
    tokenizer.clean_up_tokenization_spaces = clean_up
    end = tokenizer.eos_token_id
    completions = [tokenizer.encode(text) for text in ("one , two", "", "three")] + [[end]]
    alone = [tokenizer.decode(ids, skip_special_tokens=True) for ids in completions]
    assert decode_all(tokenizer, completions) == alone
    assert alone[-1] == "" != tokenizer.decode([end])
    assert decode_all(tokenizer, []) == []


def segment(**changes: Any) -> Any:
    fields: dict[str, Any] = {
        "logp": np.array([-1, -2], np.float32),
        "versions": np.array([4, 5], np.int32),
        "sampling_mask": SamplingMasks.from_lists([[7, 8], [9]]),
        "routes": np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2),
    }
    return build_segment("p", [1, 2, 3], [7, 9], **{**fields, **changes})


def test_segments_align_recordings() -> None:
    built = segment()
    assert built.token_ids_T.tolist() == [1, 2, 3, 7, 9]
    assert built.trainable_T.tolist() == [False, False, False, True, True]
    assert built.logp_old_T.tolist() == [0, 0, 0, -1, -2]
    assert built.version_T.tolist() == [-1, -1, -1, 4, 5]
    assert [built.sampling_mask[t].tolist() for t in range(5)] == [[], [], [], [7, 8], [9]]
    assert built.routes_TLK.shape == (5, 3, 2)
    assert built.routes_TLK[3].tolist() == [[18, 19], [20, 21], [22, 23]]
    assert (built.routes_TLK[4] == -1).all()
    empty = segment(sampling_mask=None, routes=None)
    assert empty.sampling_mask is None and empty.routes_TLK is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logp", np.zeros(3, np.float32)),
        ("version", np.zeros(1, np.int32)),
        ("sampling_mask", SamplingMasks.empty(5)),
        ("routes", np.zeros((5, 3, 2), np.int16)),
    ],
)
def test_recordings_of_a_wrong_length_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        segment(**{"versions" if name == "version" else name: value})


def test_seeds_differ_and_are_reproducible() -> None:
    seeds = {
        sibling_seed(seed, name, version, draw, sibling)
        for seed in (0, 1)
        for name in ("p1", "p11")
        for version in (0, 1)
        for draw in (0, 1)
        for sibling in range(8)
    }
    assert len(seeds) == 128 and all(0 <= seed < 2**63 for seed in seeds)
    assert sibling_seed(0, "p1", 1, 0, 2) == sibling_seed(0, "p1", 1, 0, 2)
