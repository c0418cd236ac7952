"""The judge that a run serves itself: one vLLM server on some node of the cluster.

`JudgeServer` is what the driver holds; it gives the judge's client the URL and starts a server that
died again. Importing this module does not import vLLM.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address

from keel.configs.schema import JudgeConfig
from keel.model import ray_timeouts
from keel.rollout.judge.process import STOP_S, JudgeProcess

MAX_RESTARTS, RECENT_S = 3, 3 * 3600.0
"""Times within so many seconds that the server is started again before the run is given up."""
REPLY_S = 30.0
"""Longest wait for the actor to say how its server is, and beyond the server's own deadline."""
PLACED_S = 1.0
"""An actor that does not answer in this time has no place in the cluster yet, and no server."""

log = logging.getLogger(__name__)


class JudgeActor:
    """Owns the server's process; a Ray actor. It must not outlive the actor, and does not."""

    def __init__(self, config: JudgeConfig, gpu: bool, key: str) -> None:
        stderr = Path("/proc/self/fd/2")
        place = Path(os.readlink(stderr)).parent if stderr.exists() else Path()
        if not place.is_dir() or not place.is_absolute() or place == Path("/dev"):
            place = Path(tempfile.gettempdir())
        self._timeout_s = config.server.startup_timeout_s
        self._process = JudgeProcess(
            config,
            gpu=gpu,
            host=get_node_ip_address(),
            key=key,
            log=place / f"judge-server-{os.getpid()}.log",  # among Ray's logs of this session
        )

    def start(self) -> str:
        """The server's URL, when it answers."""
        self._process.wait(self._timeout_s, "rewards.judge.server.startup_timeout_s")
        return self._process.url

    def ended(self) -> str:
        """Why the server is no more; "" while it runs."""
        return self._process.ended()

    def stop(self) -> None:
        self._process.stop()


class JudgeServer:
    """`keel.rewards.judge.results.ServedJudge`: a judge that belongs to this run."""

    def __init__(
        self, config: JudgeConfig, *, gpu: bool, options: Mapping[str, Any] | None = None
    ) -> None:
        """Begins to start it; `url` waits for that. Needs Ray. `options`: Ray options of its actor,
        over the defaults (GPUs of its own, where `gpu`)."""
        self._config, self._gpu, self._options = config, gpu, options or {}
        self.key = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._stopped = False
        self._times: list[float] = []
        self._url = ""
        self._launch()

    @property
    def restarts(self) -> int:
        """Times that it was started again in this run."""
        return len(self._times)

    def url(self) -> str:
        """Of a server that runs; one that died is started again first.

        Raises RuntimeError, with the end of the server's log, when it cannot be had.
        """
        with self._lock:
            if self._url:
                why = self._ended()
                if not why:
                    return self._url
                now = time.monotonic()
                recent = sum(now - at < RECENT_S for at in self._times)
                if recent >= MAX_RESTARTS:
                    raise RuntimeError(
                        f"the judge's server died {recent + 1} times within "
                        f"{RECENT_S / 3600:g} hours; the last time: {why}"
                    )
                self._url = ""
                self._times.append(now)
                log.warning("the judge's server died and is started again: %s", why)
                ray_timeouts.kill(self._actor)
                self._launch()
            self._url = self._wait()
            return self._url

    def stop(self) -> None:
        """End the server, also while another thread waits for it. Safe to call twice."""
        if self._stopped:
            return
        self._stopped = True
        # If that fails, the server has ended, or does with its actor.
        with contextlib.suppress(RayError, TimeoutError, ray_timeouts.RayLost):
            asked = ray_timeouts.call(self._actor.__ray_ready__)
            if ray_timeouts.wait([asked], seconds=PLACED_S)[0]:
                ray_timeouts.get(ray_timeouts.call(self._actor.stop), seconds=STOP_S)
        ray_timeouts.kill(self._actor)

    def _launch(self) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": 4}
        if self._gpu:
            options |= {"num_cpus": 1, "num_gpus": self._config.server.tensor_parallel}
        self._actor = ray_timeouts.create(
            JudgeActor, "judge", {**options, **self._options}, self._config, self._gpu, self.key
        )
        self._starting = ray_timeouts.call(self._actor.start)
        if self._stopped:  # meanwhile, by another thread
            ray_timeouts.kill(self._actor)

    def _wait(self) -> str:
        limit = self._config.server.startup_timeout_s + REPLY_S
        try:
            return str(ray_timeouts.get(self._starting, seconds=limit))
        except RayTaskError as error:
            raise RuntimeError(str(error.cause)) from error
        except RayActorError as error:
            why = "it was stopped" if self._stopped else f"its actor died: {error}"
            raise RuntimeError(f"the judge's server did not start: {why}") from error
        except GetTimeoutError as error:
            raise RuntimeError(
                f"the judge's server did not start: waited {limit:.0f} s for it "
                "(rewards.judge.server.startup_timeout_s); has the cluster room for it?"
            ) from error

    def _ended(self) -> str:
        try:
            return str(ray_timeouts.get(ray_timeouts.call(self._actor.ended), seconds=REPLY_S))
        except RayActorError as error:
            return f"its actor died: {error}"
        except GetTimeoutError:
            return ""  # busy, or cut off: Ray says so in time if it has died
