"""The placement kept: one Ray placement group, reserved whole before any actor starts."""

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
from keel.trainer.placement.hardware import SHARED, Placement, Seat, allowed, place
from keel.trainer.placement.nodes import cluster_nodes

TRY_S = 5.0
"""What looked free can be taken the next moment: look again after so long."""
POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    placement: Placement
    group: PlacementGroup

    def options(self, kind: str, index: int) -> dict[str, Any]:
        """Ray options that put an actor on its seat. Another may take it when that one has died."""
        owner = self.placement.owner(kind, index)
        return {
            "num_cpus": 1,
            "num_gpus": SHARED if owner.shared else owner.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                self.group, placement_group_bundle_index=_owners(self.placement).index(owner)
            ),
        }


@contextmanager
def reserve_gpus(config: Config, *, timeout_s: float, only: str = "") -> Iterator[Reservation]:
    """All GPUs of a run (only: of its actors of this kind), held until exit. The actors on them
    must be gone by then.

    Raises ConfigError at once for what the cluster could not hold if it were idle, and TimeoutError
    when others did not free enough of it within `timeout_s`.
    """
    reservation = _reserve(config, timeout_s, only)
    try:
        yield reservation
    finally:
        _give_back(reservation.group)


def _reserve(config: Config, timeout_s: float, only: str) -> Reservation:
    place(config, [node.empty() for node in allowed(cluster_nodes(), config.run)], only=only)
    end = time.monotonic() + timeout_s
    while True:
        try:
            placement = place(config, allowed(cluster_nodes(), config.run), only=only)
        except ConfigError as error:
            lacking = str(error)
        else:
            group = bounded(partial(_group, placement), CALL_S, "take a reservation")
            patience_s = max(0.0, min(TRY_S, end - time.monotonic()))
            if bounded(partial(group.wait, patience_s), CALL_S, "say what is reserved"):
                return Reservation(placement=placement, group=group)
            _give_back(group)
            lacking = "Ray did not grant what looked free"
        if time.monotonic() + POLL_S >= end:
            raise TimeoutError(
                f"waited {timeout_s:g} s (run.startup_timeout_s) for GPUs that others use now: "
                f"{lacking}"
            )
        time.sleep(POLL_S)


def _group(placement: Placement) -> PlacementGroup:
    """One bundle an owner of GPUs, on its node; its guest has a core in it, too."""
    owners = _owners(placement)
    return placement_group(
        [{"CPU": 2.0 if seat.shared else 1.0, "GPU": float(seat.gpus)} for seat in owners],
        strategy="PACK",
        bundle_label_selector=[{"ray.io/node-id": seat.node.id} for seat in owners],
    )


def _give_back(group: PlacementGroup) -> None:
    attempt(lambda: remove_placement_group(group), CALL_S, "give up a reservation")


def _owners(placement: Placement) -> list[Seat]:
    return [seat for seat in placement.seats if placement.owner(seat.kind, seat.index) is seat]
