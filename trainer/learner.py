"""Run the trainer's ranks: `Learner` controls them from the driver, and `TrainerWorker` is the Ray
actor of one rank, a thin wrapper around `TrainerEngine`."""

from __future__ import annotations

import logging
import os
import socket
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from keel.configs.schema import Config, ConfigError
from keel.model import ray_timeouts
from keel.model.batch_invariant import variables
from keel.model.imports import heavy_imports
from keel.rl.futures import done, never_abort
from keel.rl.metrics import Metric, Sum, merge
from keel.rl.packing import PackPlan, TrainBatch, plan_packing, split_optimizer_steps
from keel.rl.sft import SftExample
from keel.rl.supervisor import JOIN_S
from keel.rl.types import ScoredGroup, Segment, StepResult, TokenNumbers
from keel.trainer.nonfinite import Finding, describe_findings
from keel.trainer.placement.hardware import RANK_CPUS
from keel.trainer.placement.watchdog import available_cores
from keel.trainer.rank_calls import STEP, CallDeadline, RankCalls, RankLocation
from keel.trainer.run.errors import OutOfMemory, WorkerLost
from keel.trainer.run.folder import MARK
from keel.trainer.run.manifest import Entry
from keel.trainer.run.trajectory_files import saved_segments

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from transformers import PreTrainedModel

    from keel.trainer.engine.engine import TrainerEngine
    from keel.trainer.placement.elastic import OomRecovery
    from keel.weights.sender import Sender

_FETCH_S = 240.0  # seconds after which recordings that have not arrived count as lost
_GONE = "their recordings were lost with the node that sampled them"
_PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Allocator settings that speed up pinning of host memory: 8.4 instead of 2.1 GiB/s on a machine
with an H200. A rank with offloading pins tens of GiB in its first step."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
"""The folder in which the NVIDIA driver lists all GPUs, including those hidden from this
process."""
_LOG = logging.getLogger(__name__)


class Learner:
    """Controls the trainer ranks from the driver."""

    def __init__(
        self,
        model_path: str,
        config: Config,
        *,
        gpu: bool,
        actor_options: Callable[[int], Mapping[str, Any]] | None = None,
        put_to_sleep: Callable[[], Future[None]] = done,
        oom_recovery: OomRecovery | None = None,
    ) -> None:
        """Create one Ray actor per rank. `actor_options(i)` returns the Ray options for rank i. By
        default, each rank reserves one GPU, or half a core if there are no GPUs. `put_to_sleep`
        starts putting the engines to sleep (`rollout.time_share`), and is called before every
        operation that needs the weights on the GPUs. `oom_recovery` lowers the memory that steps
        need; without it, a step that runs out of memory is not repeated."""
        seat = {"num_cpus": 1, "num_gpus": 1} if gpu else {"num_cpus": RANK_CPUS}
        options = seat | {"runtime_env": {"env_vars": variables(config.model.batch_invariant)}}
        ranks = [
            ray_timeouts.create(
                TrainerWorker,
                f"trainer rank {rank}",
                {**options, **(actor_options(rank) if actor_options else {})},
                rank,
                model_path,
                config,
                gpu=gpu,
            )
            for rank in range(config.trainer.ranks)
        ]
        transfer = config.rollout.weight_transfer
        self.direct = transfer == "direct" or (transfer == "auto" and gpu)
        """True if the ranks send their weights to the engines themselves."""
        self._ranks, self._config = RankCalls(ranks, config, direct=self.direct), config
        self._put_to_sleep, self._oom_recovery = put_to_sleep, oom_recovery
        self._prepared = self._ranks.submit("prepare", [()] * len(ranks))
        self._senders: list[threading.Thread] = []
        self.version = 0
        """Version of the ranks' weights."""
        self.say: Callable[[str, str], object] = lambda kind, text: _LOG.warning(text)
        """Receives the kind and the text of messages about groups that are left out and steps that
        ran out of memory."""
        self.token_numbers: Mapping[int, TokenNumbers] = {}
        """Per-token values from the last step for the segments to be saved, keyed by segment."""

    def wait_until_prepared(self) -> None:
        """Wait until every rank has loaded its libraries and the model into host memory, within
        `run.startup_timeout_s`. Raises RuntimeError if a library is missing or has a wrong version.
        """
        seconds = self._config.run.startup_timeout_s
        what = "loading the trainer's libraries and model"
        self._ranks.wait(self._prepared, CallDeadline(what, seconds, "run.startup_timeout_s"))

    def start(self) -> list[str]:
        """Load the model on every rank within `run.startup_timeout_s`. Returns the notes from rank
        0."""
        seconds = self._config.run.startup_timeout_s
        deadline = CallDeadline("the trainer's start", seconds, "run.startup_timeout_s")
        mark = self._config.run.folder.absolute() / MARK
        text = mark.read_text() if mark.exists() else ""
        self._ranks.locations = self._ranks.call_all("location", str(mark), deadline=deadline)
        for rank, location in enumerate(self._ranks.locations):
            if text and location.mark != text:
                raise ConfigError(
                    f"run.dir = {mark.parent}: trainer rank {rank} on {location.host} "
                    "does not see it. It must be on a file system that all machines share"
                )
        (rendezvous,) = self._ranks.wait(
            [ray_timeouts.call(self._ranks.actors[0].listen)], deadline
        )
        return self._ranks.call_all("start", rendezvous, deadline=deadline)[0]

    def step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        """Take the optimizer steps for a batch. Each rank fetches the recordings of its replica's
        trajectories and packs them. Groups whose recordings are lost are left out and counted as
        dropped."""
        return self.retry_on_oom(lambda _: self._step(groups))

    def _step(self, groups: Sequence[ScoredGroup]) -> StepResult:
        asleep = self._put_to_sleep()
        saved, kept = saved_segments(groups, self._config.run), groups
        plans = plan_batches(groups, self._config, saved)
        while lost := self._pack(plans):
            kept = [group for group in kept if lost.isdisjoint(group.recording_refs)]
            text = f"{len(groups) - len(kept)} of {len(groups)} groups are left out: {_GONE}"
            self.say("lost", text)
            if not any(group.group.trajectories for group in kept):
                raise WorkerLost(f"no group is left: {_GONE}")
            plans = plan_batches(kept, self._config, saved)
        ray_timeouts.await_future(asleep)
        result = self._step_packed(len(plans[0]), kept)
        if len(kept) < len(groups):
            before, after = (sum(len(g.group.trajectories) for g in gs) for gs in (groups, kept))
            dropped = {"rollout/dropped_completions": Sum(before - after)}
            result = replace(result, metrics={**result.metrics, **dropped})
        return result

    def step_on(
        self, plans: Sequence[Sequence[PackPlan]], examples: Sequence[SftExample]
    ) -> StepResult:
        """Take one optimizer step per plan on conversations. `plans` has a list for each
        data-parallel replica. `examples` are used only in messages about non-finite values. Raises
        OutOfMemory if a step doesn't fit on a rank's GPU."""
        self._pack(plans)  # conversations have no recordings that could be lost
        return self._step_packed(len(plans[0]), examples)

    def _pack(self, plans: Sequence[Sequence[PackPlan]]) -> set[Any]:
        """Pack the next step's batches on the ranks. Returns references to lost recordings."""
        return set[Any]().union(*self._ranks.call_replicas("pack", plans, "packing"))

    def _step_packed(self, steps: int, examples: Sequence[ScoredGroup | SftExample]) -> StepResult:
        """Take `steps` optimizer steps on the batches from `_pack`."""
        arguments = [()] * len(self._ranks.actors)
        reports: list[StepReport] = self._ranks.call_timed("step", arguments, STEP, steps)
        if reports[0].out_of_memory:
            raise OutOfMemory(f"{STEP} did not fit: {reports[0].out_of_memory}", dropped=True)
        self.version = reports[0].version
        self.token_numbers = merge_tokens([report.token_numbers for report in reports])
        findings = [finding for report in reports for finding in report.findings]
        return StepResult(
            version=self.version,
            metrics=merge(report.metrics for report in reports),
            findings=describe_findings(findings, examples),
            gave_up=reports[0].gave_up,
        )

    def retry_on_oom(self, act: Callable[[Config], StepResult]) -> StepResult:
        """Call `act` with configs that use less and less memory until the step fits."""
        if (recovery := self._oom_recovery) is None:
            return act(self._config)
        retries = 0
        while True:
            try:
                result = act(self._config)
                break
            except OutOfMemory as error:
                if not error.dropped:
                    raise
                self.say("out of memory", f"warning: {recovery.reduce_memory(error)}")
                self._apply_config(recovery.config)
                retries += 1
        metrics = dict(result.metrics)
        if retries:
            metrics["train/out_of_memory"] = Sum(float(retries))
        if recovery.fewer:
            metrics["train/ranks"] = Sum(float(self._config.trainer.ranks))
        return replace(result, metrics=metrics)

    def _apply_config(self, config: Config) -> None:
        trainers = (self._config.trainer, config.trainer)
        before, now = ((t.activation_checkpointing, t.keeps_attention) for t in trainers)
        if now != before:
            deadline = self._ranks.deadline("switching activation checkpointing")
            self._ranks.call_all("checkpoint_activations", now[1], deadline=deadline)
        self._config = self._ranks.config = config

    def evaluate_nll(
        self,
        plans: Sequence[Mapping[str, PackPlan]],
        should_abort: Callable[[], bool] = never_abort,
    ) -> dict[str, Metric]:
        """Compute the mean negative log-likelihood of named sets of conversations, planned for each
        data-parallel replica. Returns `<name>/nll` for each set, or an empty dict if
        `should_abort()` returns True. Each call to the ranks evaluates a single micro-batch, so
        that it finishes within the timeout for a step."""
        parts: list[dict[str, Metric]] = []
        for name in plans[0] if plans else ():
            rows = zip(*(own[name].micro_batches for own in plans), strict=True)
            for row in rows:
                if should_abort():
                    return {}
                pieces = [
                    {name: replace(own[name], micro_batches=(one,))}
                    for own, one in zip(plans, row, strict=True)
                ]
                what = f"evaluating conversations of {name}"
                parts += self._ranks.call_replicas("evaluate_nll", pieces, what)
        return merge(parts)

    def put_engines_to_sleep(self) -> None:
        ray_timeouts.await_future(self._put_to_sleep())

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        return self._ranks.call_all("put_weights", deadline=self._ranks.deadline("the weights"))[0]

    def send_weights(self, engines: Mapping[int, Any]) -> dict[int, Future[int]]:
        """Send the current weights to engines, given as actors by index, once the ranks are idle.
        Rank i sends to engines i, i + ranks, and so on. Returns a future for each engine, which
        resolves to the engine's new weight version or raises an error from the engine or rank."""
        sent = {index: Future[int]() for index in engines}
        ranks = len(self._ranks.actors)
        parts: list[dict[int, Any]] = [{} for _ in range(ranks)]
        for index, actor in engines.items():
            parts[index % ranks][index] = actor
        refs = self._ranks.submit("send_weights", [(part,) for part in parts])

        def settle(results: Mapping[int, int | Exception]) -> None:
            for index, result in results.items():
                with suppress(InvalidStateError):
                    if isinstance(result, Exception):
                        sent[index].set_exception(result)
                    else:
                        sent[index].set_result(result)

        def wait() -> None:
            try:
                self._ranks.wait(
                    refs, self._ranks.deadline("sending weights to the engines"), settle
                )
            except Exception as error:  # the futures' waiters handle it
                settle(dict.fromkeys(sent, error))

        sender = threading.Thread(target=wait, daemon=True)
        self._senders = [*filter(threading.Thread.is_alive, self._senders), sender]
        sender.start()
        return sent

    def save(self, folder: Path) -> dict[str, Entry]:
        parts = self._with_folder("save", folder, f"saving {folder}")
        return {name: entry for part in parts for name, entry in part.items()}

    def load(self, folder: Path) -> None:
        self.version = self._with_folder("load", folder, f"loading {folder}")[0]

    def export(self, folder: Path) -> dict[str, Entry]:
        parts = self._with_folder("export", folder, f"exporting to {folder}")
        return {name: entry for part in parts for name, entry in part.items()}

    def _with_folder(self, method: str, folder: Path, what: str) -> list[Any]:
        self.put_engines_to_sleep()
        return self._ranks.call_all(
            method, str(folder.absolute()), deadline=self._ranks.deadline(what)
        )

    def shutdown(self) -> None:
        for rank in self._ranks.actors:
            ray_timeouts.kill(rank)
        for sender in self._senders:  # these threads wait on Ray, which ends next
            sender.join(JOIN_S)


def plan_batches(
    groups: Sequence[ScoredGroup], config: Config, saved: Sequence[Segment] = ()
) -> list[list[PackPlan]]:
    """Divide the completion groups of a batch among optimizer steps and data-parallel replicas.
    Returns a list of plans for each replica, one per optimizer step. `saved` are the segments to
    be saved."""
    algorithm, trainer = config.algorithm, config.trainer
    models = config.data.references
    references = {
        name: models.index(source.teacher)
        for name, source in config.data.domains.items()
        if source.teacher in models  # not if the domain is only evaluated
    }
    steps = [
        plan_packing(
            part,
            replicas=trainer.data_parallel,
            micro_batch_tokens=trainer.micro_batch_tokens,
            skip_uniform_groups=algorithm.skip_uniform_groups,
            mask_delta=algorithm.mask_delta,
            share_prompts=trainer.share_prompts,
            saved=saved,
            references=references,
        )
        for part in split_optimizer_steps(groups, algorithm.updates_per_batch)
    ]
    return [list(plans) for plans in zip(*steps, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    version: int
    metrics: dict[str, Metric]
    token_numbers: dict[int, TokenNumbers] = field(default_factory=dict[int, TokenNumbers])
    """Per-token values of the segments to be saved, keyed by segment."""
    findings: tuple[Finding, ...] = ()
    gave_up: str = ""
    out_of_memory: str = ""
    """The error message if the step ran out of memory and was undone, or an empty string."""


def merge_tokens(parts: Sequence[Mapping[int, TokenNumbers]]) -> dict[int, TokenNumbers]:
    """Merge the per-token values from ranks that each processed one shard of a micro-batch."""
    numbers = sorted({number for part in parts for number in part})
    return {
        number: TokenNumbers.merged([part[number] for part in parts if number in part])
        for number in numbers
    }


class TrainerWorker:
    """Runs one trainer rank in its own process. GPU libraries are imported only in `prepare`."""

    def __init__(self, rank: int, model_path: str, config: Config, *, gpu: bool) -> None:
        ray_timeouts.exit_with_raylet()
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each rank its own GPU only
        if not gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed warns that it guessed
        # Engines and ranks share the cores of a CPU machine. Threads that spin while they wait
        # (the default) make a step ten times slower there. Read when PyTorch is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if gpu and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
            os.environ.setdefault("PYTORCH_ALLOC_CONF", _PINNED)
        self._rank, self._model_path, self._config = rank, model_path, config
        self._gpu = gpu
        self._model: PreTrainedModel | None = None
        self._engine: TrainerEngine | None = None
        self._store: Store | None = None
        self._sender: Sender | None = None
        self._packed: list[TrainBatch] = []

    def prepare(self) -> None:
        """Import and check the libraries, and load the model into host memory if this rank has to
        read it (see `read_once`). Uses no GPU memory."""
        with heavy_imports():  # the driver imports this module
            import torch  # noqa: PLC0415
            from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

            from keel.model.load import load_policy  # noqa: PLC0415
            from keel.trainer.engine.deepspeed_internals import check_libraries  # noqa: PLC0415
            from keel.trainer.engine.zero import compute_dtype  # noqa: PLC0415

        check_libraries()
        disable_progress_bar()
        dtype = compute_dtype(self._config, torch.device("cuda" if self._gpu else "cpu"))
        if self._rank < self._config.trainer.reading_ranks:
            torch.manual_seed(self._config.run.seed)  # for indexers missing from the folder
            with suppress(Exception):  # `start` reads it again and raises
                warm_up = self._config.trainer.attention == "warm-up"
                self._model = load_policy(self._model_path, dtype, new_indexers=warm_up)

    def location(self, mark: str) -> RankLocation:
        """Describe this process and the `mark` file in the run folder, as this node sees it."""
        stderr, text = Path("/proc/self/fd/2"), ""
        log = os.readlink(stderr) if stderr.exists() else ""
        with suppress(OSError):
            text = Path(mark).read_text()
        return RankLocation(host=socket.gethostname(), pid=os.getpid(), log=log, mark=text)

    def listen(self) -> tuple[str, int]:
        """Open the store that the ranks use to find each other. Returns its host and port."""
        import torch.distributed as dist  # noqa: PLC0415  (the driver imports this module)

        host = ray.util.get_node_ip_address()
        # Listen on one address only: the store trusts every writer.
        listening = socket.create_server((host, 0))
        port = int(listening.getsockname()[1])
        self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
            host,
            port,
            self._config.trainer.ranks,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return host, port

    def start(self, rendezvous: tuple[str, int]) -> list[str]:
        import torch  # noqa: PLC0415  (as above)
        import torch.distributed as dist  # noqa: PLC0415

        # Ray shares arrays of batches read-only between processes; nothing here writes them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        trainer = self._config.trainer
        if not torch.cuda.is_available():
            torch.set_num_threads(trainer.threads)
        elif trainer.offload_optimizer:
            # Ray's default is one thread. Divide the machine's cores among its ranks.
            gpus = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
            ranks = min(trainer.ranks, gpus or trainer.ranks)
            torch.set_num_threads(max(1, available_cores() // ranks))

        from keel.trainer.engine.engine import TrainerEngine  # noqa: PLC0415  (loads DeepSpeed)
        from keel.weights.sender import Sender  # noqa: PLC0415

        if self._store is None:
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *rendezvous, trainer.ranks, wait_for_workers=False
            )
        model, self._model = self._model, None
        self._engine = TrainerEngine(
            self._model_path, self._config, rank=self._rank, store=self._store, loaded=model
        )
        timeout_s = self._config.rollout.update_timeout_s
        self._sender = Sender(rendezvous, self._engine.device, timeout_s=timeout_s)
        return self._engine.notes

    def pack(self, plans: Sequence[PackPlan]) -> set[Any]:
        """Fetch the recordings that `plans` need, and pack the batches for `step`. Returns the
        references to lost recordings. If any are lost, nothing is packed."""
        refs = set[Any]().union(*(plan.recording_refs for plan in plans))
        found = ray_timeouts.fetch([*refs], seconds=_FETCH_S) if refs else {}
        lost = refs - found.keys()
        self._packed = [] if lost else [plan.pack(found) for plan in plans]
        return lost

    def step(self) -> StepReport:
        """Train on the batches from the last `pack`. Raises ValueError if nothing is packed."""
        batches, self._packed = self._packed, []
        if not batches:
            raise ValueError("an optimizer step needs packed batches: call `pack` first")
        import torch  # noqa: PLC0415  (as above)

        try:
            metrics = self.engine.step(batches)
        except torch.OutOfMemoryError as error:
            short = str(error)
        else:
            return StepReport(
                version=self.engine.version,
                metrics=metrics,
                findings=tuple(self.engine.findings),
                gave_up=self.engine.gave_up,
                token_numbers=self.engine.token_numbers,
            )
        # Here, outside the handler, nothing refers to the step's tensors any more.
        if not self.engine.recover():
            raise torch.OutOfMemoryError(short)
        return StepReport(version=self.engine.version, metrics={}, out_of_memory=short)

    def checkpoint_activations(self, keep_attention: bool) -> None:
        self.engine.checkpoint_activations(keep_attention=keep_attention)

    def evaluate_nll(self, plans: Mapping[str, PackPlan]) -> dict[str, Metric]:
        return {
            f"{name}/{metric}": value
            for name, plan in plans.items()
            for metric, value in self.engine.evaluate_nll(plan.pack()).items()
        }

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        """Put the weights into Ray's object store from rank 0, one bucket at a time."""
        from keel.weights.channel import Bucket, HostData  # noqa: PLC0415  (loads torch)

        return [
            ray_timeouts.put(Bucket(entries=entries, data=HostData(flat.cpu().numpy())))
            for entries, flat in self.engine.buckets(requested=self._rank == 0)
        ]

    def send_weights(self, engines: Mapping[int, Any]) -> dict[int, int | Exception]:
        """Send the weights to this rank's engines, given as actors by index. Returns
        `Sender.send`'s result. Every rank must call this."""
        assert self._sender is not None
        buckets = self.engine.buckets(requested=bool(engines))
        return self._sender.send(buckets, engines, self.engine.version)

    def save(self, folder: str) -> dict[str, Entry]:
        return self.engine.save(Path(folder))

    def load(self, folder: str) -> int:
        self.engine.load(Path(folder))
        return self.engine.version

    def export(self, folder: str) -> dict[str, Entry]:
        return self.engine.export(Path(folder))

    @property
    def engine(self) -> TrainerEngine:
        assert self._engine is not None, "not started"
        return self._engine
