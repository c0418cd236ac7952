"""Runs the judge model on vLLM servers on the cluster's nodes. For each server, the driver holds a
`JudgeServer` that restarts it if it dies or hangs. This module does not import vLLM."""

import contextlib
import logging
import os
import secrets
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import get_node_ip_address

from keel.configs.schema import JudgeConfig
from keel.model import ray_timeouts
from keel.rl.supervisor import EXIT_S, MARGIN_S, RestartLimit
from keel.rollout.judge.process import HANG_TIMEOUT_S, VllmServer

_PLACED_S = 1.0  # an actor that has not answered by then probably has no server yet

log = logging.getLogger(__name__)


class _JudgeActor(VllmServer):
    """Ray actor that runs the server process. The server stops when the actor exits."""

    def __init__(self, config: JudgeConfig, gpu: bool, key: str) -> None:
        server = config.server
        self._timeout_s = server.startup_timeout_s
        options: dict[str, Any] = {
            "model": config.model,
            "served_model_name": config.model,
            "dtype": server.dtype,
            "max_num_seqs": config.max_concurrent,
            # Weak judges otherwise emit endless white space.
            "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        }
        if server.max_model_len:
            options["max_model_len"] = server.max_model_len
        if gpu:
            options["gpu_memory_utilization"] = server.gpu_memory_utilization
            options["tensor_parallel_size"] = server.tensor_parallel
        handle, name = tempfile.mkstemp(prefix="keel-judge-", suffix=".log")
        os.close(handle)
        super().__init__(
            {**options, **server.options},
            gpu=gpu,
            threads=server.threads,
            kv_cache_gib=server.kv_cache_gib,
            host=get_node_ip_address(),
            key=key,
            log=Path(name),
        )

    def start(self) -> str:
        """Wait until the server responds to requests, and return its URL."""
        self.wait(self._timeout_s)
        return self.url

    def end(self) -> None:
        """Stop the server, and remove its log unless the server has failed."""
        if not self.ended():
            self._log.unlink(missing_ok=True)
        self.stop()


class JudgeServer:
    """A judge server that belongs to a run. Implements `keel.rewards.judge.specs.ServedJudge`."""

    def __init__(
        self, config: JudgeConfig, *, gpu: bool, options: Mapping[str, Any] | None = None
    ) -> None:
        """Start the server without waiting until it is ready. Ray must be running. `options` are
        Ray options for the actor and override the defaults."""
        self._config, self._gpu, self._options = config, gpu, options or {}
        self.key = secrets.token_hex(16)
        self._lock = threading.Lock()
        self._stopped = False
        self._limit = RestartLimit()
        self.restarts = 0
        """Number of times the server has been restarted during this run."""
        self._url = ""
        self._launch()

    def url(self) -> str:
        """Return the URL of the running server, restarting it first if it has died or hangs. Raises
        RuntimeError with the end of the server's log if it can't be started."""
        with self._lock:
            if self._url:
                reason = self._lost()
                if not reason:
                    return self._url
                if times := self._limit.count():
                    raise RuntimeError(f"the judge server died {times}; last reason: {reason}")
                self._url = ""
                self.restarts += 1
                log.warning("judge server is restarted: %s", reason)
                ray_timeouts.kill(self._actor)
                self._launch()
            self._url = self._wait()
            return self._url

    def stop(self) -> None:
        """Stop the server, even while another thread is waiting for it. Calling this again has no
        effect."""
        if self._stopped:
            return
        self._stopped = True
        # On failure the server has ended or ends with its actor.
        with contextlib.suppress(RayError, TimeoutError, ray_timeouts.RayLost):
            ready = ray_timeouts.call(self._actor.__ray_ready__)
            if ray_timeouts.wait([ready], seconds=_PLACED_S)[0]:
                ray_timeouts.get(ray_timeouts.call(self._actor.end), seconds=EXIT_S)
        ray_timeouts.kill(self._actor)

    def _launch(self) -> None:
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0, "max_concurrency": 4}
        if self._gpu:
            options |= {"num_cpus": 1, "num_gpus": self._config.server.tensor_parallel}
        self._actor = ray_timeouts.create(
            _JudgeActor, "judge", {**options, **self._options}, self._config, self._gpu, self.key
        )
        self._starting = ray_timeouts.call(self._actor.start)
        if self._stopped:  # by another thread
            ray_timeouts.kill(self._actor)

    def _wait(self) -> str:
        limit = self._config.server.startup_timeout_s + MARGIN_S
        try:
            return str(ray_timeouts.get(self._starting, seconds=limit))
        except RayTaskError as error:
            reason = str(error.cause)
        except RayActorError as error:
            reason = "it was stopped" if self._stopped else f"its actor died: {error}"
        except GetTimeoutError:
            reason = f"no answer within {limit:.0f} s; is there room in the cluster?"
        raise RuntimeError(f"the judge server (rewards.judge.server) did not start: {reason}")

    def _lost(self) -> str:
        try:
            lost = ray_timeouts.call(self._actor.lost)
            return str(ray_timeouts.get(lost, seconds=HANG_TIMEOUT_S + MARGIN_S))
        except RayActorError as error:
            return f"its actor died: {error}"
        except GetTimeoutError:
            return ""  # busy or unreachable; Ray reports a death eventually
