from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from keel.trainer.engine.process_group import join_ranks, limit_waits


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("LOCAL_RANK", "0")
    join_ranks(0, 1, None, timeout_s=77)
    yield
    dist.destroy_process_group()


def test_groups_made_after_the_first_wait_as_long(alone: None) -> None:
    def waits() -> list[timedelta]:
        backends = [
            group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map
        ]
        return [backend.options._timeout for backend in backends]

    dist.new_group([0])  # as DeepSpeed makes them
    assert waits() == [timedelta(seconds=77), timedelta(minutes=30)]
    limit_waits(77)
    assert waits() == [timedelta(seconds=77)] * 2
