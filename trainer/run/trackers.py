"""Send the metrics and events of a run to Weights & Biases, MLflow and trackio.

A background thread for each tracker reads `metrics.jsonl` and `events.jsonl` as they grow, so a
slow or unreachable tracker does not delay the run and catches up later. `trackers/NAME.json`
records how much was sent, so that steps repeated by a resumed run are not sent again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, is_dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from keel.configs.diff import flatten_config
from keel.configs.paths import write_whole
from keel.configs.schema import Config, ConfigError
from keel.trainer.run.signals import preemption_signal, signals_blocked

if TYPE_CHECKING:  # `check_trackers` runs before torch is loaded
    from keel.trainer.run.journal import Journal

_RunEnd = Literal["finished", "stopped", "failed"]
"""The outcome of a run. A run that was `stopped` can be resumed with the same command."""
_PROJECT = "keel"  # default project name. Environment variables can override it.
_EVENT = "tracker"  # the kind of the events that this module writes. They are not sent to trackers.
_RETRY_S, _HANG_S = 30.0, 120.0
_ABANDONED = "keel-abandoned-"  # prefix for the names of abandoned threads
_CLOSE_S, _HURRY_S = 60.0, 5.0
"""Maximum seconds to wait for trackers when a run ends, normally and after a preemption."""
_WANDB_TIMEOUT_S, _WANDB_PROCESS = 60.0, "wandb-core"
_MLFLOW_STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_MAX_PARAMS, _PARAM_CHARACTERS, _TAG_CHARACTERS = 100, 6000, 5000
"""MLflow's limits on parameters per request, and on characters per parameter and per tag."""


class _Tracker(ABC):
    """Sends a run's metrics and events to an experiment tracker. All methods are called from the
    same thread and may block. Calls that raise an exception are retried."""

    remedy: str  # advice for the user after a failure

    def __init__(self, package: str) -> None:
        self._api: Any = import_module(package)
        self._run: Any = None

    @abstractmethod
    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        """Start a run, or resume the run with this `id` if it isn't empty. Returns the id and the
        address where the run's curves can be viewed."""

    @abstractmethod
    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        """Log a step's metrics. Steps arrive in order, but a step that was evaluated later is
        logged a second time. `time` is in seconds since the epoch."""

    @abstractmethod
    def event(self, step: int, time: float, kind: str, text: str) -> None: ...

    @abstractmethod
    def close(self, end: _RunEnd) -> None: ...


class _Wandb(_Tracker):
    """Logs to Weights & Biases, configured through WANDB_* variables. The server accepts each step
    only once."""

    remedy = "Check WANDB_API_KEY, WANDB_BASE_URL and the network, or set WANDB_MODE=offline"

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        settings = self._api.Settings(
            console="off",  # would record every redraw of the panel
            silent=True,
            init_timeout=_WANDB_TIMEOUT_S,
            finish_timeout=_WANDB_TIMEOUT_S,
        )
        offline = self._api.setup().settings.mode == "offline"
        with signals_blocked():  # its process sends the rest when a scheduler ends the job
            self._run = self._api.init(
                project=os.environ.get("WANDB_PROJECT") or _PROJECT,
                name=os.environ.get("WANDB_NAME") or folder.name,
                id=id or os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4),
                dir=os.environ.get("WANDB_DIR") or folder,
                config=dict(knobs),
                allow_val_change=True,
                # Offline there is no server to ask; `wandb sync` joins the parts by their id.
                resume=None if offline else "allow",
                reinit="finish_previous",
                settings=settings,
            )
        sync = f"offline; `wandb sync {self._run.settings.sync_dir}` sends it"
        return self._run.id, sync if offline else str(self._run.url)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        # A resumed run ignores steps that the server has, so a late evaluation joins the next one.
        at = max(step, self._run.starting_step)
        self._run.log({**numbers, "_timestamp": time}, step=at)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = "INFO" if kind == "resume" else "WARN"
        self._run.alert(f"{kind}, step {step}", text, level=level, wait_duration=0)

    def close(self, end: _RunEnd) -> None:
        if end == "stopped":
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if end == "finished" else 1)


class _Mlflow(_Tracker):
    """Logs to MLflow, configured through MLFLOW_* variables, and resumes a run by its id.
    Parameters keep the values from the first start, because MLflow can't change them."""

    remedy = "Check MLFLOW_TRACKING_URI, the server's credentials and the network"

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        client = self._client = self._api.MlflowClient()
        if id:
            self._run = id
            client.update_run(id, status="RUNNING")
        else:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _PROJECT
            existing = client.get_experiment_by_name(name)
            experiment = existing.experiment_id if existing else client.create_experiment(name)
            began = round(time.time() * 1000)
            self._run = client.create_run(experiment, began, run_name=folder.name).info.run_id
            params = [
                self._api.entities.Param(_mlflow_name(knob), str(value)[:_PARAM_CHARACTERS])
                for knob, value in knobs.items()
            ]
            for first in range(0, len(params), _MAX_PARAMS):
                client.log_batch(self._run, params=params[first : first + _MAX_PARAMS])
        return self._run, f"run {self._run} of {os.environ.get('MLFLOW_TRACKING_URI', 'mlflow')}"

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        points = [
            self._api.entities.Metric(_mlflow_name(name), value, round(time * 1000), step)
            for name, value in numbers.items()
        ]
        self._client.log_batch(self._run, metrics=points)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        value = f"step {step}: {text}"[:_TAG_CHARACTERS]
        tag = self._api.entities.RunTag(f"event.{round(time * 1000)}.{kind}", value)
        self._client.log_batch(self._run, tags=[tag])

    def close(self, end: _RunEnd) -> None:
        self._client.set_terminated(self._run, _MLFLOW_STATUS[end])


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow doesn't allow in names. For example, `eval/sums/pass@1`
    becomes `eval/sums/pass_at_1`."""
    name = name.replace("@", "_at_").replace("[", ".").replace("]", "")
    return re.sub(r"[^\w\-. :/]", "_", name)


class _Trackio(_Tracker):
    """Logs to trackio, configured through TRACKIO_* variables. It buffers unsent data and retries
    on its own."""

    remedy = "Check TRACKIO_DIR, TRACKIO_SPACE_ID or TRACKIO_SERVER_URL, its token and the network"

    def open(self, folder: Path, id: str, knobs: Mapping[str, Any]) -> tuple[str, str]:
        name = id or f"{folder.name}-{secrets.token_hex(3)}"
        project = os.environ.get("TRACKIO_PROJECT") or _PROJECT
        resume = "allow" if id else "never"
        self._run = self._api.init(project, name, config=dict(knobs), resume=resume)
        # Without the query of the URL, which is a write token.
        server = os.environ.get("TRACKIO_SERVER_URL", "").partition("?")[0]
        host = server or os.environ.get("TRACKIO_SPACE_ID", "")
        show = f"; `trackio show --project {project}`"
        return name, f"run {name}" + (f" in project {project} of {host}" if host else show)

    def log(self, step: int, time: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def event(self, step: int, time: float, kind: str, text: str) -> None:
        level = "INFO" if kind == "resume" else "WARN"
        self._run.alert(kind, text, level=self._api.AlertLevel[level], step=step)

    def close(self, end: _RunEnd) -> None:
        self._run.finish()


_TRACKERS = {"wandb": _Wandb, "mlflow": _Mlflow, "trackio": _Trackio}
"""Maps each value of `run.trackers` to its tracker. The value is also the name of a package and of
an extra."""


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker's package isn't installed or W&B has no API key."""
    for name in names:
        if find_spec(name) is None:
            raise ConfigError(
                f"run.trackers: {name}: the package is not installed. Run pip install '.[{name}]' "
                "in Keel's checkout, or remove it from run.trackers"
            )
        mode = os.environ.get("WANDB_MODE", "online")
        if name == "wandb" and mode == "online" and not os.environ.get("WANDB_API_KEY"):
            wandb: Any = import_module("wandb")  # takes a second
            online = wandb.setup().settings.mode == "online"
            if online and not wandb.login(prompt=False, verify=False):
                raise ConfigError(
                    "run.trackers: wandb: there is no API key. Run `wandb login`, set "
                    "WANDB_API_KEY, or set WANDB_MODE=offline"
                )


class _TrackerThread:
    """Background thread that sends a run's metrics and events to a single tracker."""

    def __init__(
        self,
        name: str,
        make: Callable[[], _Tracker],
        folder: Path,
        knobs: Mapping[str, Any],
        say: Callable[[str], None],
        *,
        retry_s: float = _RETRY_S,
        hang_s: float = _HANG_S,
    ) -> None:
        self.name, self._make, self._folder, self._knobs = name, make, folder, knobs
        self._say, self._retry_s, self._hang_s = say, retry_s, hang_s
        self._file = folder / "trackers" / f"{name}.json"
        self._sent: dict[str, Any] = {"id": "", "step": -1, "events": 0}
        """The tracker's id of the run, the last step sent to it, and the number of events sent to
        it."""
        with suppress(OSError, ValueError):  # no file, or one cut by a power failure
            self._sent |= json.loads(self._file.read_text())
        self._tracker: _Tracker | None = None
        self._remedy = ""
        self._metrics, self._events = folder / "metrics.jsonl", folder / "events.jsonl"
        self._position = {self._metrics: 0, self._events: 0}
        """How many bytes of each file have been read."""
        self._old = self._metrics.stat().st_size if self._metrics.exists() else 0
        """How many bytes of `metrics.jsonl` were written by earlier processes."""
        self._events_read = 0
        self._wake, self.done = threading.Event(), threading.Event()
        self._end: _RunEnd | None = None
        self._busy_since, self._warned, self._not_before = 0.0, False, 0.0
        self._wake.set()
        self._thread = threading.Thread(target=self._run, name=f"keel-{name}", daemon=True)
        self._thread.start()

    @property
    def step(self) -> int:
        return self._sent["step"]

    def wake(self) -> None:
        self._wake.set()
        since = self._busy_since
        if since and time.monotonic() - since > self._hang_s:
            self._warn(f"has not answered for {self._hang_s:.0f} s")

    def close(self, end: _RunEnd) -> None:
        """Tell the thread to send the remaining lines in the background and then set `done`."""
        self._end = end
        self._wake.set()

    def abandon(self) -> None:
        """Give up a thread that is hanging, so that the process can exit."""
        self._say = lambda _: None
        self._thread.name = f"{_ABANDONED}{self.name}"
        # The interpreter would wait for the process of W&B for minutes. `wandb sync` can still
        # upload what it has received.
        with suppress(psutil.Error):
            for process in psutil.Process().children():
                if _WANDB_PROCESS in process.name():
                    process.kill()

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._say(
                f"warning: {self.name} {text}. The run continues, and {self.name} is retried and "
                f"catches up later. {self._remedy}"
            )

    def _run(self) -> None:
        while not self.done.is_set():
            self._wake.wait()
            self._wake.clear()
            if self._end is None and time.monotonic() < self._not_before:
                continue
            end, self._busy_since = self._end, time.monotonic()
            try:
                self._send()
                if end is not None and self._tracker is not None:
                    self._tracker.close(end)
                if self._warned:
                    self._warned = False
                    self._say(f"{self.name} has caught up with the run")
            except (Exception, SystemExit) as error:  # packages may raise anything
                self._not_before = time.monotonic() + self._retry_s
                text = " ".join(_redact_secrets(f"{type(error).__name__}: {error}").split())
                self._warn(f"failed ({text})")
            self._busy_since = 0.0
            if end is not None:
                self.done.set()

    def _send(self) -> None:
        if self._tracker is None:
            tracker = self._make()
            self._remedy = tracker.remedy
            run, location = tracker.open(self._folder.resolve(), self._sent["id"], self._knobs)
            self._tracker = tracker
            self._progressed(id=run)
            self._say(f"{self.name}: {_redact_secrets(location)}")
        for line in self._unread(self._metrics):
            step, at = line.pop("step"), line.pop("time")
            # An evaluation that was made after a resume is a second line for its step. Of that
            # line, only the evaluation is sent: the step has its own costs and alarms.
            late = step == self.step and self._position[self._metrics] >= self._old
            if late:
                trained = any(name.startswith(("time/", "reward/")) for name in line)
                line = {n: v for n, v in line.items() if n.startswith("eval/") and not trained}
            if step > self.step or (late and line):
                # Trackers group metrics by the part before a slash.
                grouped = {n if "/" in n else f"train/{n}": value for n, value in line.items()}
                self._tracker.log(step, at, grouped)
                self._progressed(step=step)
        for line in self._unread(self._events):
            if self._events_read >= self._sent["events"]:
                if line["kind"] != _EVENT:
                    self._tracker.event(line["step"], line["time"], line["kind"], line["text"])
                self._progressed(events=self._events_read + 1)
            self._events_read += 1

    def _unread(self, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._position[path])
            for line in file:
                if not line.endswith(b"\n"):
                    return
                with suppress(ValueError):  # cut by a full disk or a power failure
                    yield json.loads(line)
                self._position[path] += len(line)

    def _progressed(self, **sent: Any) -> None:
        self._busy_since = time.monotonic()
        self._sent |= sent
        self._file.parent.mkdir(exist_ok=True)
        write_whole(self._file, json.dumps(self._sent))


def has_abandoned_threads() -> bool:
    """Return True if an abandoned thread is still running, which can crash the interpreter at
    exit."""
    return any(thread.name.startswith(_ABANDONED) for thread in threading.enumerate())


def _close_threads(
    threads: Sequence[_TrackerThread],
    end: _RunEnd,
    step: int,
    say: Callable[[str], None],
    seconds: float = _CLOSE_S,
) -> None:
    """Wait up to `seconds` for everything up to `step` to be sent. Then abandon any threads that
    are still busy."""
    for thread in threads:
        thread.close(end)
    until = time.monotonic() + seconds
    for thread in threads:
        ended = thread.done.wait(max(0.0, until - time.monotonic()))
        if not ended:
            thread.abandon()
        if not ended or thread.step < step:
            say(
                f"warning: {thread.name} received {max(thread.step, 0)} of {step} steps. "
                "Resume the run to send the rest, which is in metrics.jsonl"
            )


def open_trackers(stack: ExitStack, journal: Journal, folder: Path, config: Config) -> None:
    """Start sending a run's metrics and events to `run.trackers`, until `stack` is closed."""
    if not (names := config.run.trackers):
        return
    say, knobs = partial(journal.say, _EVENT), _plain_knobs(config)
    threads = [_TrackerThread(n, partial(_TRACKERS[n], n), folder, knobs, say) for n in names]

    def wake() -> None:
        for thread in threads:
            thread.wake()

    def close(kind: type[BaseException] | None, *_: object) -> None:
        failed = bool(journal.ends) or (kind is not None and issubclass(kind, Exception))
        completed = journal.step >= config.run.steps
        end: _RunEnd = "failed" if failed else "finished" if completed else "stopped"
        journal.begin(f"sending the rest to {', '.join(names)}")
        hurry = preemption_signal() or (kind is not None and not failed)  # such as a second Ctrl-C
        _close_threads(threads, end, journal.step, say, _HURRY_S if hurry else _CLOSE_S)

    journal.on_write = wake
    stack.push(close)


def _plain_knobs(config: Config) -> dict[str, Any]:
    """Return all knobs as JSON values. Environment options are left out, because they may contain
    secrets."""

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)

    flat = flatten_config(config)
    secret = re.compile(r"\.environment\.(env|arguments\.options)\b")
    return {
        knob: json.loads(json.dumps(value, default=plain))
        for knob, value in flat.items()
        if not secret.search(knob)
    }


def _redact_secrets(text: str) -> str:
    """Remove secrets from a text: the values of secret environment variables, and passwords in
    URLs."""
    for name, value in os.environ.items():
        if re.search(r"KEY|TOKEN|SECRET|PASSWORD", name) and len(value) >= 8:
            text = text.replace(value, "…")
    return re.sub(r"//[^/@\s]+@", "//…@", text)
