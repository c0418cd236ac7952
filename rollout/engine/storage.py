"""Separates recordings from an engine's results, so that they stay in Ray's object store on the
engine's node until a trainer rank packs them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from keel.rl.prefix_sharing import hash_rows
from keel.rl.turns import TurnResult
from keel.rl.types import Group, Recordings, Segment, StoredRecordings, Trajectory
from keel.rollout.spec import STORED_BYTES, GroupRequest, SampleRequest


def count_completions(request: SampleRequest) -> int:
    return request.size if isinstance(request, GroupRequest) else 1


def detach(request: SampleRequest, result: Group | TurnResult) -> list[Any]:
    """Return the result without its recordings, followed by the `Recordings` of each completion, or
    None for recordings that are so small that they stay in the result. In the result, a recording's
    key is the number of its completion. Small groups are returned as they are, and larger ones have
    `Segment.stored` in every completion, so that prefixes can be compared."""
    stored: list[Recordings | None] = [None] * count_completions(request)
    if isinstance(result, TurnResult):
        turn = Recordings(
            routes_RLK=result.routes_RLK,
            sampling_mask=result.sampling_mask,
            selected_RLb=result.selected_RLb,
        )
        rows = 0 if turn.routes_RLK is None else len(turn.routes_RLK)
        description, stored[0] = _split(turn, rows + 1 - len(result.token_ids_N), 0)
        absent = dict.fromkeys(("routes_RLK", "sampling_mask", "selected_RLb"))
        result = replace(result, **absent, stored=description)
    else:
        wholes = [_recordings_of(*one.segments) for one in result.trajectories]
        if all(map(_is_small, wholes)):
            return [result, *stored]
        trajectories: list[Trajectory] = []
        for trajectory, whole in zip(result.trajectories, wholes, strict=True):
            (segment,), number = trajectory.segments, trajectory.sibling
            description, stored[number] = _split(whole, int(segment.trainable_T.argmax()), number)
            absent = dict.fromkeys(("routes_TLK", "sampling_mask", "selected_TLb"))
            segment = replace(segment, **absent, stored=description)
            trajectories.append(replace(trajectory, segments=(segment,)))
        result = replace(result, trajectories=tuple(trajectories))
    return [result, *stored]


def _recordings_of(segment: Segment) -> Recordings:
    routes, selected = segment.routes_TLK, segment.selected_TLb
    return Recordings(
        routes_RLK=None if routes is None else routes[:-1],
        sampling_mask=segment.sampling_mask,
        selected_RLb=None if selected is None else selected[:-1],
    )


def _is_small(recordings: Recordings) -> bool:
    return recordings.nbytes < STORED_BYTES


def _split(
    recordings: Recordings, prefix: int, number: int
) -> tuple[StoredRecordings | None, Recordings | None]:
    """Describe recordings whose first `prefix` rows precede the first sampled token, and convert
    their routes to the narrowest integer type. Small recordings become part of the description."""
    routes, masks = recordings.routes_RLK, recordings.sampling_mask
    selected, small = recordings.selected_RLb, _is_small(recordings)
    if not recordings.lengths:
        return None, None
    narrow = replace(recordings, routes_RLK=None if routes is None else _narrow(routes))
    description = StoredRecordings(
        parts=((0, narrow if small else number),),
        lengths=recordings.lengths,
        routes=None if routes is None else routes.shape[1:],
        selected=None if selected is None else selected.shape[1:],
        mask_sizes_T=None if masks is None else _narrow(masks.sizes()),
        prefix_hash_P=None if routes is None else hash_rows(routes[:prefix]),
    )
    return description, None if small else narrow


def _narrow(values: NDArray[Any]) -> NDArray[Any]:
    """Convert integers to the narrowest type that holds all of them."""
    limits = (values.min(initial=0), values.max(initial=0))
    return values.astype(np.result_type(*map(np.min_scalar_type, limits)), copy=False)


def attach(result: Group | TurnResult, keys: Sequence[Any]) -> Group | TurnResult:
    """Replace the completion numbers in a result from `detach` with `keys`."""

    def renamed(part: Any) -> Any:
        if part.stored is None:
            return part
        parts = tuple(
            (start, keys[one] if isinstance(one, int) else one) for start, one in part.stored.parts
        )
        return replace(part, stored=replace(part.stored, parts=parts))

    if isinstance(result, TurnResult):
        return renamed(result)
    trajectories = (
        replace(one, segments=tuple(map(renamed, one.segments))) for one in result.trajectories
    )
    return replace(result, trajectories=tuple(trajectories))
