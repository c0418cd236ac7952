"""What Keel adds to vLLM's workers, outside an engine. The tests load vLLM, not this module."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from model.channel import Channel
from model.weights import Sent
from rl.types import NO_ROUTE

pytestmark = pytest.mark.e2e
CPU = torch.device("cpu")


def test_an_engine_that_joins_anew_closes_its_old_channel() -> None:
    from rollout.weights import WeightsExtension  # noqa: PLC0415

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    extension: Any = WeightsExtension()
    extension.rank, extension.device = 0, CPU
    extension.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))

    def join(name: str) -> Channel:
        meeting = ("127.0.0.1", store.port)
        with ThreadPoolExecutor(1) as side:
            other = side.submit(Channel, meeting, name, rank=0, size=2, device=CPU, deadline_s=10.0)
            extension.keel_join(meeting, name, 10.0)
            other.result(timeout=20)
        return extension.keel_channel

    first, second = join("first"), join("second")
    with pytest.raises(ConnectionError, match="closed"):
        first.receive(Sent(8))
    assert extension.keel_channel is second


def test_a_slot_that_was_never_filed_has_no_route() -> None:
    from rollout.routes import SlotRoutes  # noqa: PLC0415

    captured = torch.zeros((4, 3, 2), dtype=torch.int32)
    routes = SlotRoutes(captured, torch.tensor([5, 6, 0, 0]), layers=[0, 2], size=8)
    routes.file(2)  # both tokens to expert 0 alone, for all that is captured
    rows = routes.rows(np.array([5, 6, 7]))
    assert (rows[:2] == 0).all() and (rows[2] == NO_ROUTE).all()
