"""All that Keel's driver uses of Ray without a public name. No other file of trainer/ or model/
names a private module or attribute of it."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from functools import cache

import ray

STATE = "ray._private.state"
_LOG = logging.getLogger(__name__)


def quieten_token_question() -> None:
    """At every start Ray says whether the cluster asks for a token."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)


def free_by_node() -> dict[str, Mapping[str, float]]:
    """Node id → what nobody has taken of its resources.

    Ray's public functions say it of the whole cluster (`ray.available_resources`), or of each node
    what there is in all (`ray.nodes`, which is taken, with one line, where a release has moved the
    other: GPUs that others use are then waited for, and not planned around).
    """
    try:
        return importlib.import_module(STATE).available_resources_per_node()
    except (ImportError, AttributeError) as error:
        _warn(
            f"Ray {ray.__version__} is not as 2.60 was ({error}). GPUs that others use count as "
            "free here, and the run waits for them"
        )
        return {node["NodeID"]: node["Resources"] for node in ray.nodes()}


@cache  # or once for every look at the cluster
def _warn(line: str) -> None:
    _LOG.warning(line)
