"""Recordings leave an engine's results, and come back unchanged when a rank packs them."""

import pickle
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest

from keel.rl.packing import plan_packing
from keel.rl.recordings import Recordings
from keel.rl.types import Group, ScoredGroup
from keel.rollout.engine import worker
from keel.rollout.engine.worker import attach, detach
from keel.rollout.spec import GroupRequest
from tests.agents.endpoint.kit import check_law
from tests.agents.scripted import Policy
from tests.agents.test_conversation import USER, conversation_of, script
from tests.rl.rollouts import (
    as_stored,
    prompt,
    prompted_groups,
    scored,
    segments_of,
    with_segments,
)

Store = dict[str, Any]


def put_group(group: Group, store: Store) -> Group:
    return put(with_segments(group, as_stored), GroupRequest(prompt(), 5), store)


def put(result: Any, request: Any, store: Store) -> Any:
    """Detach the recordings of a result and put them into the store."""
    light, *recordings = pickle.loads(pickle.dumps(detach(request, result)))
    keys = [f"recordings {len(store) + index}" for index in range(len(recordings))]
    store |= zip(keys, recordings, strict=True)
    return attach(light, keys)


def groups_of_one_context() -> list[ScoredGroup]:
    groups = [
        [t for t in group.group.trajectories if len(t.segments) == 1]
        for seed in range(4)
        for group in prompted_groups(seed)
    ]
    return [scored(one, [float(t.sibling) for t in one]) for one in groups]


@pytest.mark.parametrize("stored_bytes", [1, 300, 600])
@pytest.mark.parametrize("share_prompts", [False, True])
def test_ranks_pack_what_was_recorded(
    share_prompts: bool, stored_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "STORED_BYTES", stored_bytes)
    store: Store = {}
    here = groups_of_one_context()
    there = [replace(g, group=put_group(g.group, store)) for g in here]
    found = [part for s in segments_of(there) for _, part in s.stored.parts]  # type: ignore[union-attr]
    assert any(isinstance(part, Recordings) for part in found) == (stored_bytes > 1)
    assert all(s.routes_TLK is s.sampling_mask is None for s in segments_of(there))
    assert {one.routes_TLK.dtype for one in store.values() if one} == {np.dtype(np.uint8)}

    def plans(groups: list[ScoredGroup]) -> Any:
        options = {"replicas": 2, "micro_batch_tokens": 200, "share_prompts": share_prompts}
        return plan_packing(groups, **options, saved=segments_of(groups)[:3])

    sent = pickle.loads(pickle.dumps(plans(there)))  # as to the ranks' processes
    batches = [plan.pack({key: store[key] for key in plan.recording_refs}) for plan in sent]
    np.testing.assert_equal([*map(asdict, batches)], [asdict(plan.pack()) for plan in plans(here)])
    rows = [row for batch in batches for row in batch.micro_batches]
    assert sorted(n for row in rows if row.saved is not None for n in row.saved if n >= 0) == [
        *range(3)
    ]
    assert any(row.follows is not None for row in rows) == share_prompts


@pytest.mark.parametrize("stored", [{0, 1, 2, 3}, {0, 3}, set[int]()])
def test_turns_are_joined_when_they_are_loaded(
    stored: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    store: Store = {}
    conversation, policy = conversation_of(), Policy(script)
    for turn in range(4):
        monkeypatch.setattr(worker, "STORED_BYTES", 1 if turn in stored else 10**9)
        request = conversation.request(max_tokens=99, seed=1)
        conversation.append_turn(request, put(policy.say(request), request, store))
        if turn == 1:
            conversation.note_messages([USER])
            conversation.rewrite([USER])
        elif turn < 3:
            conversation.continue_with([USER])
    segments = conversation.segments()
    assert len(segments) == 2 and all(segment.routes_TLK is None for segment in segments)
    loaded: list[Any] = [segment.loaded(store) for segment in segments]
    check_law(policy, loaded)
    for light, whole in zip(segments, loaded, strict=True):
        sizes = light.mask_sizes_T
        assert sizes is not None and sizes.tolist() == whole.sampling_mask.sizes().tolist()
    assert sum(one is not None for one in store.values()) == len(stored)
    if stored:
        with pytest.raises(LookupError, match="recordings are lost"):
            segments[0].loaded({})


def test_wide_routes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "STORED_BYTES", 1)
    (group, *_), store = groups_of_one_context(), Store()
    (first, *others) = group.group.trajectories
    own: Any = first.segments[0]
    wide = replace(own, routes_TLK=own.routes_TLK * np.int16(300))
    whole = replace(group.group, trajectories=(replace(first, segments=(wide,)), *others))
    result = put_group(whole, store)
    loaded: Any = result.trajectories[0].segments[0].loaded(store)
    assert np.array_equal(loaded.routes_TLK[:-1], wide.routes_TLK[:-1])
    assert (loaded.routes_TLK[-1] == -1).all()
