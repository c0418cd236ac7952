"""Run commands on simulated machines, up to the first engine."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from keel.trainer.placement.hardware import idle_nodes


class Accepted(BaseException):
    """Raised just before engines start. Not an Exception, so commands do not catch it."""


@dataclass(frozen=True)
class Machine:
    """A simulated cluster: `nodes` of `gpus` GPUs with `gib` of memory each."""

    gpus: int
    nodes: int = 1
    gib: float = 139.0


NOTHING = Machine(gpus=0, gib=0.0)


class Granted:
    """A placement group that is ready at once."""

    def wait(self, seconds: float) -> bool:
        return True


@contextlib.contextmanager
def at(machine: Machine) -> Iterator[pytest.MonkeyPatch]:
    """Run commands as if on `machine`; Accepted is raised before the first engine starts."""
    nodes = idle_nodes(machine.nodes, machine.gpus) if machine.gpus else []

    def accept(*_: Any, **__: Any) -> str:
        raise Accepted

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setattr("keel.trainer.placement.nodes._visible_gpus", lambda: machine.gpus)
        patch.setattr("keel.trainer.placement.nodes.gpu_gib", lambda: machine.gib)
        patch.setattr("keel.trainer.placement.nodes._detect_nodes", lambda: nodes)
        patch.setattr("keel.trainer.placement.nodes.cluster_nodes", lambda: nodes)
        patch.setattr("keel.trainer.placement.nodes._create_group", lambda seats: Granted())
        patch.setattr("keel.trainer.placement.nodes.remove_placement_group", lambda group: None)
        patch.setattr("keel.trainer.launch.start_ray", lambda: None)
        patch.setattr("keel.trainer.launch.start_watchdog", lambda *_: contextlib.nullcontext())
        patch.setattr("keel.trainer.launch.initial_model", accept)
        yield patch
