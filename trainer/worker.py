"""The Ray actor for a trainer rank, a thin wrapper around `TrainerEngine`. The driver also imports
this module, for example to divide a step's groups among the ranks (`plan_shares`)."""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from keel.configs.schema import Config
from keel.model import ray_timeouts
from keel.model.imports import heavy_imports
from keel.rl.metrics import Metric
from keel.rl.packing import PackPlan, TrainBatch, plan_packing, split_updates
from keel.rl.types import ScoredGroup, Segment, TokenNumbers
from keel.trainer.nonfinite import Finding
from keel.trainer.placement.memory import reading_ranks
from keel.trainer.placement.watchdog import available_cores
from keel.trainer.run.manifest import Entry
from keel.weights.sync import Outcome, Receiver

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store
    from transformers import PreTrainedModel

    from keel.trainer.engine.engine import TrainerEngine
    from keel.weights.sender import Sender

FETCH_S = 240.0
"""Seconds after which recordings that have not arrived count as lost. Ray takes 65 s to declare an
unresponsive node dead."""
_LOG_LINES = 15
_PINNED = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
"""Allocator settings that speed up pinning of host memory: 8.4 instead of 2.1 GiB/s on a machine
with an H200. A rank with offloading pins tens of GiB in its first step."""
_DRIVER = Path("/proc/driver/nvidia/gpus")
"""The folder in which the NVIDIA driver lists all GPUs, including those hidden from this
process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLocation:
    """A rank's host, process and log file, for error messages if the process dies."""

    host: str
    pid: int
    log: str
    """Path of the file with the process's standard error, or an empty string if unknown."""


def last_lines(log: str) -> str:
    lines = Path(log).read_text(errors="replace").splitlines() if Path(log).is_file() else []
    return "\n".join(["last lines of its log:", *lines[-_LOG_LINES:]]) if lines else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    version: int
    metrics: dict[str, Metric]
    tokens: dict[int, TokenNumbers] = field(default_factory=dict[int, TokenNumbers])
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


def plan_shares(
    groups: Sequence[ScoredGroup], config: Config, watched: Sequence[Segment] = ()
) -> list[list[PackPlan]]:
    """Divide the completion groups among the groups of ranks. Returns a list of plans for each
    group of ranks, one per optimizer step. `watched` are the segments to be saved."""
    algorithm, trainer = config.algorithm, config.trainer
    shares: list[list[PackPlan]] = [[] for _ in range(trainer.groups)]
    models = config.data.references
    teachers = config.data.teachers_by_domain  # some of domains that are not trained on
    references = {name: models.index(t) for name, t in teachers.items() if t in models}
    for part in split_updates(groups, algorithm.updates_per_batch):
        plans = plan_packing(
            part,
            ranks=trainer.groups,
            micro_batch_tokens=trainer.micro_batch_tokens,
            skip_uniform_groups=algorithm.skip_uniform_groups,
            sequence_mask=algorithm.mask_delta is not None,
            share_prompts=trainer.share_prompts,
            watched=watched,
            references=references,
        )
        for share, plan in zip(shares, plans, strict=True):
            share.append(plan)
    return shares


class TrainerWorker:
    """Runs one trainer rank in its own process. GPU libraries are imported only in `prepare`."""

    def __init__(self, rank: int, world_size: int, *, gpu: bool) -> None:
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each rank its own GPU only
        if not gpu:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
            os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed warns that it guessed
        # Engines and ranks share the cores of a CPU machine. Threads that spin while they wait
        # (the default) make a step ten times slower there. Read when PyTorch is first imported.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if gpu and not os.environ.get("PYTORCH_CUDA_ALLOC_CONF"):
            os.environ.setdefault("PYTORCH_ALLOC_CONF", _PINNED)
        self._rank, self._world_size = rank, world_size
        self._gpu = gpu
        self._model: PreTrainedModel | None = None
        self._engine: TrainerEngine | None = None
        self._store: Store | None = None
        self._sender: Sender | None = None
        self._packed: list[TrainBatch] = []

    def prepare(self) -> None:
        """Import and check the libraries. Takes a few seconds and uses no GPU memory."""
        with heavy_imports():
            pass
        from transformers.utils.logging import disable_progress_bar  # noqa: PLC0415

        from keel.trainer.engine.deepspeed_internals import check_libraries  # noqa: PLC0415

        disable_progress_bar()
        check_libraries()

    def read(self, model_path: str, config: Config) -> None:
        """Load the model into host memory if this rank has to read it (see `read_once`)."""
        import torch  # noqa: PLC0415  (the driver imports this module)

        from keel.model.load import load_policy  # noqa: PLC0415
        from keel.trainer.engine.zero import compute_dtype  # noqa: PLC0415

        dtype = compute_dtype(config, torch.device("cuda" if self._gpu else "cpu"))
        if self._rank < reading_ranks(config.trainer):
            torch.manual_seed(config.run.seed)  # for weights missing from the folder
            with suppress(Exception):  # `start` reads it again and raises
                self._model = load_policy(model_path, dtype)

    def location(self) -> RankLocation:
        stderr = Path("/proc/self/fd/2")
        log = os.readlink(stderr) if stderr.exists() else ""
        return RankLocation(host=socket.gethostname(), pid=os.getpid(), log=log)

    def read_text(self, path: str) -> str:
        try:
            return Path(path).read_text()
        except OSError:
            return ""

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
            self._world_size,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )
        return host, port

    def start(self, model_path: str, config: Config, rendezvous: tuple[str, int]) -> list[str]:
        import torch  # noqa: PLC0415  (as above)
        import torch.distributed as dist  # noqa: PLC0415

        # Ray shares arrays of batches read-only between processes; nothing here writes them.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        if not torch.cuda.is_available():
            torch.set_num_threads(config.trainer.threads)
        elif config.trainer.offload_optimizer:
            # Ray's default is one thread. Divide the machine's cores among its ranks.
            gpus = len(list(_DRIVER.iterdir())) if _DRIVER.is_dir() else 0
            ranks = min(self._world_size, gpus or self._world_size)
            torch.set_num_threads(max(1, available_cores() // ranks))

        from keel.trainer.engine.engine import TrainerEngine  # noqa: PLC0415  (loads DeepSpeed)
        from keel.weights.sender import Sender  # noqa: PLC0415

        if self._store is None:
            self._store = dist.TCPStore(  # pyright: ignore[reportPrivateImportUsage]
                *rendezvous, self._world_size, wait_for_workers=False
            )
        model, self._model = self._model, None
        self._engine = TrainerEngine(
            model_path,
            config,
            rank=self._rank,
            world_size=self._world_size,
            store=self._store,
            read=model,
        )
        timeout_s = config.rollout.update_timeout_s
        self._sender = Sender(rendezvous, self._engine.device, timeout_s=timeout_s)
        return self._engine.notes

    def pack(self, plans: Sequence[PackPlan]) -> set[Any]:
        """Fetch the recordings for this rank's share of the batch, and pack the share for
        `step_packed`. Returns the keys of lost recordings. If any are lost, nothing is packed."""
        keys = set[Any]().union(*(plan.keys for plan in plans))
        found = ray_timeouts.fetch([*keys], seconds=FETCH_S)
        lost = keys - found.keys()
        self._packed = [] if lost else [plan.pack(found) for plan in plans]
        return lost

    def step_packed(self) -> StepReport:
        """Train on the batches from the last `pack`. Raises ValueError if nothing is packed."""
        batches, self._packed = self._packed, []
        if not batches:
            raise ValueError("an optimizer step needs packed batches: call `pack` first")
        return self.step(batches)

    def step(self, batches: Sequence[TrainBatch]) -> StepReport:
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
                tokens=self.engine.tokens,
            )
        # Here, outside the handler, nothing refers to the step's tensors any more.
        if not self.engine.recover():
            raise torch.OutOfMemoryError(short)
        return StepReport(version=self.engine.version, metrics={}, out_of_memory=short)

    def recompute(self, keep_attention: bool) -> None:
        self.engine.recompute(keep_attention=keep_attention)

    def score(self, batches: Mapping[str, TrainBatch]) -> dict[str, Metric]:
        return {
            f"{name}/{metric}": value
            for name, batch in batches.items()
            for metric, value in self.engine.score(batch).items()
        }

    def put_weights(self) -> list[ray.ObjectRef[Any]]:
        """Put the weights into Ray's object store from rank 0, one bucket at a time."""
        return [ray_timeouts.put(bucket) for bucket in self.engine.publish()]

    def send(self, receivers: Sequence[Receiver]) -> dict[int, Outcome]:
        """Send the weights to this rank's engines. Every rank must call this."""
        assert self._sender is not None
        buckets = self.engine.buckets(requested=bool(receivers))
        return self._sender.send(buckets, receivers, self.engine.version)

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
