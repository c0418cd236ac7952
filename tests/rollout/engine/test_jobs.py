"""Tests the results of engine jobs."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import (
    Config,
    DataConfig,
    RolloutConfig,
    RunConfig,
    SourceConfig,
)
from keel.model.batch_invariant import VARIABLE
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.recordings import Recordings, SamplingMasks
from keel.rl.turns import TurnRequest, TurnResult
from keel.rollout.chat.parsing import decode_all, split_message
from keel.rollout.spec import EngineSpec, GroupRequest, LostTurn, RecordingError, env_vars
from tests.rl.rollouts import prompt, with_segments

CONTEXT = np.array([1, 2, 3], np.int32)


@pytest.fixture(scope="module")
def engine() -> Any:
    from keel.rollout.engine import vllm_engine  # noqa: PLC0415  (loads vLLM)

    return vllm_engine


def group(engine: Any, *recordings: dict[str, Any]) -> Any:
    request = GroupRequest(prompt(), len(recordings))
    job = engine.Job(request=request, context=CONTEXT, max_tokens=9)
    for sibling, recording in enumerate(recordings):
        job.add(sibling, *completion(**recording), "four")
    return with_segments(job.result(), lambda segment: segment.loaded({}))


def completion(versions: Any = (4, 5), logp: Any = (-1, -2), **recorded: Any) -> Any:
    sampled = TurnResult(
        token_ids_R=np.array([7, 9], np.int32),
        logp_old_R=np.array(logp, np.float32),
        version_R=np.array(versions, np.int32),
        finish_reason="stop",
    )
    return sampled, Recordings(**recorded)


@pytest.mark.e2e
def test_segments_align_recordings(engine: Any) -> None:
    masks = SamplingMasks.from_lists([[7, 8], [9]])
    routes = np.arange(4 * 3 * 2, dtype=np.int16).reshape(4, 3, 2)
    whole, empty = group(engine, {"sampling_mask": masks, "routes_TLK": routes}, {}).trajectories
    (built,) = whole.segments
    assert built.token_ids_T.tolist() == [1, 2, 3, 7, 9]
    assert built.trainable_T.tolist() == [False, False, False, True, True]
    assert built.logp_old_T.tolist() == [0, 0, 0, -1, -2]
    assert built.version_T.tolist() == [-1, -1, -1, 4, 5]
    assert built.sampling_mask is not None and built.routes_TLK is not None
    assert [built.sampling_mask[t].tolist() for t in range(5)] == [[], [], [], [7, 8], [9]]
    assert built.routes_TLK[:4].tolist() == routes.tolist()
    assert (built.routes_TLK[4] == -1).all()
    assert empty.segments[0].sampling_mask is None and empty.segments[0].routes_TLK is None


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("logp", np.zeros(3, np.float32)),
        ("version", np.zeros(1, np.int32)),
        ("routes", np.zeros((3, 3, 2), np.int16)),
        ("sampling_mask", SamplingMasks.empty(5)),
    ],
)
def test_recordings_of_a_wrong_length_are_refused(engine: Any, name: str, value: Any) -> None:
    recording = {{"version": "versions", "routes": "routes_TLK"}.get(name, name): value}
    job = engine.Job(request=GroupRequest(prompt(), 1), context=CONTEXT, max_tokens=9)
    job.add(0, *completion(**recording), "four")
    with pytest.raises((ValueError, RecordingError), match=name):
        job.result()


@pytest.mark.e2e
@pytest.mark.parametrize("value", [np.nan, -np.inf, np.inf])
def test_non_finite_completions_are_dropped_alone(engine: Any, value: float) -> None:
    sampled = group(engine, {"logp": (-1, value)}, {})
    assert [trajectory.sibling for trajectory in sampled.trajectories] == [1]
    assert sampled.dropped == (engine.NOT_FINITE,)
    request = TurnRequest(conversation="c", token_ids_T=CONTEXT, max_tokens=9, seed=1)
    turn = engine.Job(request=request, context=CONTEXT, max_tokens=9)
    turn.add(0, *completion(logp=(-1, value)), "")
    with pytest.raises(LostTurn) as raised:
        turn.result()
    lost = pickle.loads(pickle.dumps(raised.value))  # as from the engine's process
    assert isinstance(lost, LostTurn) and str(lost) == engine.NOT_FINITE


# The conversion of token ids to text, and of text to messages.


@pytest.mark.parametrize(
    ("raw", "opened", "content", "reasoning"),
    [
        ("<think>\n2+2\n</think>\n\n4", False, "4", "2+2"),
        ("2+2\n</think>\n\n4", True, "4", "2+2"),
        ("<think>2+2 is 4", False, "", "2+2 is 4"),
        ("4 <think>or 5", False, "", "4 or 5"),
        ("<think>a</think>4<think>b</think>", False, "4", "a\nb"),
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


def test_engine_memory_share() -> None:
    source = SourceConfig(name="q", source="jsonl", path="q.jsonl", rewards={"correct": 1.0})
    config = Config(
        run=RunConfig(gpu_gib=40.0),
        data=DataConfig(sources=(source,)),
        rollout=RolloutConfig(gpu_memory_utilization=0.5),
    )
    assert EngineSpec.of(config, "model").gpu_share(160.0) == 0.125
    assert EngineSpec.of(config, "model").gpu_share(32.0) == 0.5
    whole = replace(config, run=RunConfig())
    assert EngineSpec.of(whole, "model").gpu_share(160.0) == 0.5


@pytest.mark.parametrize(("gpu", "on"), [(True, True), (True, False), (False, True)])
def test_batch_invariance_is_set_before_import(gpu: bool, on: bool) -> None:
    variables = env_vars(RolloutConfig(), gpu=gpu, batch_invariant=on)
    assert variables.get(VARIABLE) == ("1" if gpu and on else None)
