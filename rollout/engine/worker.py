"""The Ray actor that runs an `EngineThread`. Ray imports this module before the actor's environment
variables take effect, so it imports neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

from keel.configs.schema import SamplingConfig
from keel.model import ray_timeouts
from keel.model.imports import heavy_imports
from keel.rollout.engine.storage import detach
from keel.rollout.spec import EngineError, EngineProgress, EngineSpec, SampleRequest

if TYPE_CHECKING:
    from keel.weights.channel import Rendezvous


class RolloutWorker:
    """Runs one engine. `keel.rollout.pool.ray_engines` makes it an asyncio actor."""

    def __init__(self, spec: EngineSpec) -> None:
        # Triton's default. Otherwise torch moves its cache to a folder that vLLM deletes at exit,
        # and every start compiles again.
        kernels = Path(os.environ.get("TRITON_HOME", "~"), ".triton", "cache").expanduser()
        os.environ.setdefault("TRITON_CACHE_DIR", str(kernels))
        # vLLM is loaded in the actor's process only, under its environment.
        with heavy_imports():
            from keel.rollout.engine.thread import EngineThread  # noqa: PLC0415
            from keel.rollout.engine.vllm_engine import VllmEngine  # noqa: PLC0415

        # Warnings are collected because an actor's log does not reach the terminal.
        handler, logger = BufferingHandler(1000), logging.getLogger("keel")
        handler.setLevel(logging.WARNING)
        logger.addHandler(handler)
        self._failure: EngineError | None = None
        try:
            self._engine = EngineThread(lambda: VllmEngine(spec), spec.config)
        except Exception as error:
            if not spec.spread:
                raise
            # Raised by `ready`: Ray would not report it before the engine's workers end.
            error = ray_timeouts.cause(error)
            self._failure = EngineError(f"{type(error).__name__}: {error}")
        logger.removeHandler(handler)
        self._warnings = tuple(dict.fromkeys(record.getMessage() for record in handler.buffer))

    async def ready(self) -> tuple[str, ...]:
        """Return the warnings logged during engine startup."""
        if self._failure is not None:
            raise self._failure
        return self._warnings

    async def sample(self, request: SampleRequest, sampling: SamplingConfig, record: bool) -> Any:
        """Sample a group or a turn. Cancelling the call aborts sampling."""
        future = self._engine.sample(request, sampling=sampling, record=record)
        return await asyncio.wrap_future(future)

    async def record(self, request: SampleRequest, sampling: SamplingConfig) -> list[Any]:
        """Sample a group or a turn. Returns the result and, as separate objects, the recordings of
        each completion (see `detach`)."""
        return detach(request, await self.sample(request, sampling, record=True))

    async def update(self, version: int, buckets: Sequence[Any]) -> int:
        """Load new weights, one bucket at a time. `buckets` contains object references."""
        await asyncio.to_thread(self._engine.begin_update)
        for bucket in buckets:
            await asyncio.to_thread(self._engine.load_bucket, await bucket)
        await asyncio.to_thread(self._engine.finish_update, version)
        return version

    async def sleep(self) -> None:
        await asyncio.to_thread(self._engine.sleep)

    async def gpus(self) -> list[str]:
        return await asyncio.to_thread(self._engine.gpus)

    async def join(self, rendezvous: Rendezvous, name: str, shares: bool) -> None:
        await asyncio.to_thread(self._engine.join, rendezvous, name, shares=shares)

    async def receive(self) -> None:
        await asyncio.to_thread(self._engine.receive)

    async def progress(self) -> EngineProgress:
        return self._engine.progress()
