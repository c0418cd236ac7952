"""Reserves the GPUs of a placement as one Ray placement group before any actor starts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from keel.configs.schema import Config, ConfigError
from keel.model.ray_timeouts import CALL_S, attempt, bounded
from keel.trainer.placement.hardware import SHARED_GPU, Placement, Seat, allowed, place
from keel.trainer.placement.nodes import cluster_nodes

_GRANT_S = 5.0  # plan again if Ray has not granted a group by then: the GPUs may be taken
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """A placement and the Ray placement group that reserves its GPUs."""

    placement: Placement
    group: PlacementGroup

    def options(self, kind: str, index: int) -> dict[str, Any]:
        """Return the Ray options that start an actor on its assigned GPUs."""
        owner = self.placement.owner(kind, index)
        return {
            "num_cpus": 1,
            "num_gpus": SHARED_GPU if owner.shared else owner.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=_owners(self.placement).index(owner)
            ),
        }


@contextmanager
def reserve_gpus(config: Config, *, timeout_s: float, only: str = "") -> Iterator[Reservation]:
    """Reserve the GPUs for a run until this process exits. If `only` is set, GPUs are reserved only
    for actors of this kind. Raises ConfigError if the cluster would be too small even when idle,
    and TimeoutError if other users do not free enough GPUs in time."""
    place(config, [node.empty() for node in allowed(cluster_nodes(), config.run)], only=only)
    end = time.monotonic() + timeout_s
    while True:
        reason = "Ray did not grant GPUs that looked free"
        try:
            placement = place(config, allowed(cluster_nodes(), config.run), only=only)
        except ConfigError as error:
            reason = str(error)
        else:
            group = bounded(partial(_group, placement), CALL_S, "take a reservation")
            grant_s = max(0.0, min(_GRANT_S, end - time.monotonic()))
            if bounded(partial(group.wait, grant_s), CALL_S, "report reservations"):
                break
            _release(group)
        if time.monotonic() + _POLL_S >= end:
            raise TimeoutError(
                f"no free GPUs after {timeout_s:g} s (run.startup_timeout_s): {reason}"
            )
        time.sleep(_POLL_S)
    try:
        yield Reservation(placement=placement, group=group)
    finally:
        _release(group)


def _group(placement: Placement) -> PlacementGroup:
    """Create a placement group with one bundle for each actor that owns GPUs, on the actor's node.
    The bundle has another CPU core if the actor has a guest."""
    owners = _owners(placement)
    return placement_group(
        [{"CPU": 2.0 if seat.shared else 1.0, "GPU": float(seat.gpus)} for seat in owners],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": seat.node.id} for seat in owners],
    )


def _release(group: PlacementGroup) -> None:
    attempt(lambda: remove_placement_group(group), CALL_S, "give up a reservation")


def _owners(placement: Placement) -> list[Seat]:
    return [seat for seat in placement.seats if placement.owner(seat.kind, seat.index) is seat]
