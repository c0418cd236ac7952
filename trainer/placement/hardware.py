"""Describe the GPUs and nodes available to a run, and assign actors to GPUs.

All GPUs of an actor are on the same node, except those of an engine with more GPUs than any node
has. Such an engine gets the same number of GPUs on each of its nodes. Actors of the same kind are
placed on as few nodes as possible, because neighbouring ranks exchange the most data. The kind of
actor that needs the most GPUs of a node is the hardest to fit, so it is placed first. In a tie,
trainer ranks come first.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Self

from keel.configs.schema import Config, ConfigError, RunConfig
from keel.trainer.placement.memory import GIB, DoesNotFit, gib

RANK, ENGINE, JUDGE = "trainer rank", "engine", "judge"
RANK_CPUS = 0.5
"""CPU cores that Ray reserves for a rank without a GPU. Ranks and engines then take turns."""
SHARED_GPU = 0.5
"""Fraction of a GPU that Ray reserves for each of two actors that share it. Their memory is divided
by other knobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """A GPU's peak rates per second, from its datasheet. Link rates are per direction."""

    name: str = "NVIDIA H200"
    flops: float = 989e12  # Peak dense bfloat16 throughput in FLOP/s
    memory_bytes: float = 4.8e12
    link_bytes: float = 450e9  # bandwidth between GPUs in the same node
    network_bytes: float = 50e9  # network bandwidth per GPU (400 Gb/s)
    host_bytes: float = 44e9
    """Bandwidth to and from pinned host memory, measured on PCIe 5. PCIe 4 is assumed to be half as
    fast."""
    node_gpus: int = 8
    flash4: bool = True  # True if FlashAttention-4 supports the GPU (Hopper and Blackwell)
    sparse_kernels: bool = True  # True on Hopper (keel.model.sparse.kernels)

    def between(self, gpus: int) -> float:
        """Return the bandwidth between `gpus` GPUs, which can span several nodes."""
        return self.link_bytes if gpus <= self.node_gpus else self.network_bytes

    @property
    def ring_bytes(self) -> float:
        """Bandwidth of a ring across nodes, of which every GPU's network card carries its part."""
        return min(self.link_bytes, self.node_gpus * self.network_bytes)


_FLASH4 = re.compile(r"\bG?[BH]\d(?!0\b)|\b[H]20\b")
"""Matches Hopper and Blackwell data-centre GPUs. Desktop Blackwell GPUs need other kernels."""
_HOPPER = re.compile(r"\bG?H\d")
_PCIE4, _PCIE5 = 32.0, 64.0
_SPECS: tuple[tuple[str, float, float, float], ...] = (
    ("GB300|GB200", 2500, 8.0, 900),
    ("B300|B200", 2250, 8.0, 900),
    ("GH200", 989, 4.0, 450),
    ("H200 NVL", 836, 4.8, 450),
    ("H200", 989, 4.8, 450),
    ("H100 NVL", 836, 3.9, 300),
    ("H100 PCIe", 756, 2.0, _PCIE5),
    ("H100", 989, 3.35, 450),
    ("H800", 989, 3.35, 200),
    ("H20", 148, 4.0, 450),
    ("A100 80GB PCIe", 312, 1.94, _PCIE4),
    ("A100-PCIE-40GB", 312, 1.56, _PCIE4),
    ("A100-SXM4-40GB", 312, 1.56, 300),
    ("A100", 312, 2.04, 300),
    ("A800", 312, 2.04, 200),
    ("L40S", 362, 0.864, _PCIE4),
    ("L40", 181, 0.864, _PCIE4),
    ("L4", 121, 0.3, _PCIE4),
    ("A40", 150, 0.696, _PCIE4),
    ("A10G", 70, 0.6, _PCIE4),
    ("RTX 6000 Ada", 364, 0.96, _PCIE4),
    ("RTX A6000", 155, 0.768, _PCIE4),
    ("RTX 5090", 210, 1.79, _PCIE5),
    ("RTX 4090", 165, 1.01, _PCIE4),
)
"""Rates of known GPUs: a pattern for the driver's name, bfloat16 TFLOP/s, memory TB/s and link
GB/s. The first matching row is used."""


def _spec_of(name: str) -> GpuSpec:
    """Look up a GPU's spec by name. Falls back to an H200's rates for an unknown GPU."""
    default = GpuSpec()
    if not name:
        return default
    flash4, hopper = bool(_FLASH4.search(name)), bool(_HOPPER.search(name))
    for pattern, tflops, terabytes, link in _SPECS:
        if part := re.search(rf"\b({pattern})\b", name):
            pcie5 = flash4 or link == _PCIE5
            return GpuSpec(
                name=f"NVIDIA {part[0]}",
                flops=1e12 * tflops,
                memory_bytes=1e12 * terabytes,
                link_bytes=1e9 * link,
                host_bytes=default.host_bytes / (1 if pcie5 else 2),
                flash4=flash4,
                sparse_kernels=hopper,
            )
    unknown = f"{default.name} (Keel has no rates of {name})"
    return replace(default, name=unknown, flash4=flash4, sparse_kernels=hopper)


@dataclass(frozen=True, slots=True)
class _Kind:
    """All actors of one kind. Each actor needs `gpus` GPUs and, on each of its `nodes`, one CPU
    core (two if it shares its GPUs with an actor of the kind `guest`)."""

    name: str
    count: int
    gpus: int
    knobs: str  # the knobs that the user can lower if the actors do not fit
    guest: str = ""  # the kind of actor that shares GPUs with this kind, if any
    nodes: int = 1

    @property
    def cpus(self) -> int:
        return 2 if self.guest else 1

    @property
    def gpus_on_node(self) -> int:
        return self.gpus // self.nodes

    def __str__(self) -> str:
        text = f"{self.count} {self.name}(s)" + f" of {self.gpus}" * (self.gpus > 1)
        text += f" on {self.nodes} nodes each" * (self.nodes > 1)
        return text + f" with an {self.guest} each" * bool(self.guest)


def _kinds(config: Config, largest: int) -> list[_Kind]:
    """List the kinds of actors in a run, for nodes with at most `largest` GPUs."""
    r, t, judge = config.rollout, config.trainer, config.rewards.judge
    engines = r.engines if config.data.sources else 0  # SFT samples nothing
    knobs, width = "rollout.engines or rollout.tensor_parallel", r.tensor_parallel
    spread = max(1, -(-width // max(1, largest)))
    kinds = [_Kind(RANK, t.ranks, 1, "trainer.ranks")]
    kinds += [_Kind(ENGINE, engines, width, knobs, nodes=spread)] * bool(engines)
    server, knobs = judge.server, "rewards.judge.server.replicas or tensor_parallel"
    judging = _Kind(JUDGE, server.replicas, server.tensor_parallel, knobs)
    return [*kinds, *[judging] * judge.serve]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    id: str = ""  # Ray's node id, or an empty string before the cluster exists
    gpus: int
    cpus: int
    free_gpus: int
    free_cpus: float
    in_use: bool = False
    """True if other programs use some of the node's GPUs. Only Ray knows which ones."""
    memory_gib: float = 0.0  # host memory in GiB, or 0 if unknown

    def room(self, kind: _Kind) -> int:
        return int(min(self.free_gpus // kind.gpus_on_node, self.free_cpus // kind.cpus))

    def empty(self) -> Self:
        return replace(self, free_gpus=self.gpus, free_cpus=self.cpus, in_use=False)

    def __str__(self) -> str:
        if self.free_cpus < self.free_gpus:
            return f"{self.name} ({self.free_gpus} GPUs, {self.free_cpus:g} CPU cores)"
        return f"{self.name} ({self.free_gpus})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware to plan a run for, either detected or described in the recipe."""

    gpu: bool
    nodes: tuple[Node, ...] = ()  # the nodes that have GPUs, in their current state
    gpu_gib: float = 0.0  # memory per GPU in GiB, or 0 if unknown
    gpu_name: str = ""  # GPU name reported by the driver, or an empty string if unknown
    fp8: bool = True  # False if the detected GPUs have no FP8 units
    found: bool = True  # True if the hardware was detected on this machine or on the cluster
    note: str = ""  # the source of this information
    missing: str = ""
    """Why the recipe does not fit yet, if some of `nodes` have not joined the cluster."""

    @property
    def signature(self) -> dict[str, Any]:
        return {
            "GPUs of each node": [node.gpus for node in self.nodes],
            "GiB of a GPU": round(self.gpu_gib),
            **({"GPU": self.gpu_name} if self.gpu_name else {}),
        }

    @property
    def spec(self) -> GpuSpec:
        spec = _spec_of(self.gpu_name)
        gpus = max((node.gpus for node in self.nodes), default=spec.node_gpus)
        return replace(spec, node_gpus=max(1, gpus))

    @property
    def idle(self) -> list[Node]:
        return [node.empty() for node in self.nodes]

    def __str__(self) -> str:
        sizes = [node.gpus for node in self.nodes]
        parts = [f"{sizes.count(n)} node(s) of {n} GPU(s)" for n in dict.fromkeys(sizes)]
        size = f"{gib(self.gpu_gib * GIB)} each" * bool(self.gpu_gib)
        memory = size or "of unknown memory (run.gpu_gib)"
        return f"{' and '.join(parts)}, {memory}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The GPUs of a node that are assigned to one actor. An engine may have several seats."""

    kind: str
    index: int
    node: Node
    gpus: int
    first: int | None
    """Id of the first GPU. The other GPUs have the ids that follow. None if other programs also use
    the node."""
    shared: bool = False
    """True if the actor shares its GPUs with the actor of another kind that has the same index."""
    spread: bool = False  # True if the actor has seats on other nodes, too


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The GPUs assigned to each actor, in the order of the GPUs on each node."""

    seats: tuple[Seat, ...]

    @property
    def shared(self) -> bool:
        return any(seat.shared for seat in self.seats)

    @property
    def gpus(self) -> int:
        return sum(seat.gpus for seat in self.seats if not (seat.shared and seat.kind == ENGINE))

    @property
    def ranks_by_node(self) -> list[tuple[Node, int]]:
        nodes = {id(seat.node): seat.node for seat in self.seats}
        ranks = Counter(id(seat.node) for seat in self.seats if seat.kind == RANK)
        return [(nodes[node], count) for node, count in ranks.items()]

    @property
    def required_nodes(self) -> set[str]:
        """Ids of the nodes that a run cannot continue without. A node with judge servers alone is
        not required if another node has judge servers, too."""
        judging = {seat.node.id for seat in self.seats if seat.kind == JUDGE}
        others = {seat.node.id for seat in self.seats if seat.kind != JUDGE}
        return others if len(judging) > 1 else others | judging

    def owner(self, kind: str, index: int) -> Seat:
        """Return the seat that holds an actor's GPUs. For an engine on several nodes, this is its
        first seat. Shared GPUs belong to the rank's seat."""
        seat = next(s for s in self.seats if (s.kind, s.index) == (kind, index))
        if not seat.shared:
            return seat
        return next(s for s in self.seats if s.kind == RANK and s.index == index)

    def lines(self) -> Iterator[str]:
        """Yield a line for each node, such as `node 0: engines 0–1 on GPUs 0–3 (2 each)`."""
        for (_, name), group in groupby(self.seats, key=lambda s: (s.node.id, s.node.name)):
            parts: list[str] = []
            ordered = sorted(group, key=lambda seat: (seat.kind, seat.index))
            for kind, alike in groupby(ordered, key=lambda s: s.kind):
                seats = list(alike)
                first, last, many = seats[0], seats[-1], len(seats) > 1
                total = sum(seat.gpus for seat in seats)
                gpus = f"{total} of its {first.node.gpus} GPUs"
                if first.first is not None:
                    end = first.first + total - 1
                    gpus = f"GPUs {first.first}–{end}" if total > 1 else f"GPU {first.first}"
                actors = f"{kind}s {first.index}–{last.index}" if many else f"{kind} {first.index}"
                each = f" ({first.gpus} each)" * (many and first.gpus > 1)
                parts.append(f"{actors} on {gpus}{each}" + ", shared" * first.shared)
            yield f"{name}: {'; '.join(parts)}"


def place(config: Config, nodes: Iterable[Node], *, only: str = "") -> Placement:
    """Assign GPUs to all actors, or only to actors of kind `only`. Engines share GPUs with ranks if
    `rollout.colocated` is set or there is only one GPU. Raises ConfigError if there aren't enough
    free GPUs, if no node has enough of them for a single actor, or if an engine on several nodes
    can't have equally many on each."""
    nodes = list(nodes)
    largest = max((node.gpus for node in nodes), default=0)
    placed = [kind for kind in _kinds(config, largest) if only in ("", kind.name)]
    for kind in placed:
        if kind.gpus % kind.nodes:
            raise ConfigError(
                f"rollout.tensor_parallel = {kind.gpus}: nodes have at most {largest} GPUs, and an "
                f"engine cannot have the same number of GPUs on each of {kind.nodes} nodes. Use a "
                f"multiple of {kind.nodes}, or at most {largest}"
            )
    available = sum(node.free_gpus for node in nodes)
    single = available == sum(node.gpus for node in nodes) <= 1
    paired = [kind.name for kind in placed] == [RANK, ENGINE] and _gpus(placed) == 2
    if not only and (config.rollout.colocated or (single and paired)):
        placed = [
            replace(kind, guest=ENGINE) if kind.name == RANK else kind
            for kind in placed
            if kind.name != ENGINE
        ]
    if available < _gpus(placed):
        raise _too_small_error(config, f"needs {_gpus(placed)} GPU(s)", nodes, placed)
    if not only and config.rollout.time_share and not any(kind.guest for kind in placed):
        raise ConfigError(
            "rollout.time_share: engines and trainer have separate GPUs here, so it gains "
            "nothing. Switch it off, or let them share GPUs with rollout.colocated"
        )
    remaining = list(nodes)
    assigned: list[list[tuple[_Kind, int]]] = [[] for _ in nodes]
    for kind in sorted(placed, key=lambda kind: -kind.gpus_on_node):
        done = 0
        while missing := kind.count * kind.nodes - done:
            rooms = [node.room(kind) for node in remaining]
            enough = [index for index, room in enumerate(rooms) if room >= missing]
            if enough:  # the smallest node that holds all of them
                index = min(enough, key=lambda i: remaining[i].free_gpus)
            else:  # fill the largest
                index = max(range(len(rooms)), key=rooms.__getitem__)
            count = min(rooms[index], missing)
            if not count:
                what = f"needs room on {'one node' if kind.nodes == 1 else f'{kind.nodes} nodes'}"
                what += f" for each {kind.name} of {kind.gpus} GPU(s)"
                raise _too_small_error(config, what, nodes, placed)
            assigned[index] += [(kind, done + i) for i in range(count)]
            node = remaining[index]
            remaining[index] = replace(
                node,
                free_gpus=node.free_gpus - kind.gpus_on_node * count,
                free_cpus=node.free_cpus - kind.cpus * count,
            )
            done += count
    seats: list[Seat] = []
    for node, actors in zip(nodes, assigned, strict=True):
        first = 0
        for kind, number in actors:
            known = first if node.free_gpus == node.gpus and not node.in_use else None
            index, gpus = number // kind.nodes, kind.gpus_on_node
            for name in filter(None, (kind.name, kind.guest)):
                seat = Seat(kind=name, index=index, node=node, gpus=gpus, first=known)
                seats.append(replace(seat, shared=bool(kind.guest), spread=kind.nodes > 1))
            first += gpus
    return Placement(seats=tuple(seats))


def _gpus(kinds: Sequence[_Kind]) -> int:
    return sum(kind.count * kind.gpus for kind in kinds)


_NAMED_NODES = 8


def _too_small_error(
    config: Config, what: str, nodes: Sequence[Node], placed: Sequence[_Kind]
) -> DoesNotFit:
    run = config.run
    limits = f" (run.gpus_per_node = {run.gpus_per_node}, run.nodes = {run.nodes})"
    names = [*map(str, nodes[:_NAMED_NODES])] + ["…"] * (len(nodes) > _NAMED_NODES)
    free = ", ".join(names) or "no GPUs"
    knobs = ", ".join(kind.knobs for kind in placed)
    fixes = f"Lower {knobs}"
    if config.rollout.tensor_parallel == 1:  # an engine on a CPU is one process
        fixes += " (one engine and one rank can share a GPU), or set run.device=cpu run.gpu_gib=0 "
        fixes += "run.gpus_per_node=0"
    return DoesNotFit(
        f"the recipe {what} ({' and '.join(map(str, placed))}), and the cluster has {free} free"
        f"{limits * bool(run.gpus_per_node)}. {fixes}"
    )


def idle_nodes(count: int, gpus: int) -> list[Node]:
    return [
        Node(name=f"node {i}", gpus=gpus, cpus=2 * gpus, free_gpus=gpus, free_cpus=2 * gpus)
        for i in range(count)
    ]


def limit_nodes(nodes: Iterable[Node], run: RunConfig) -> list[Node]:
    """Limit the nodes and GPUs to the numbers set in `run.nodes` and `run.gpus_per_node`."""
    limit = run.gpus_per_node
    if not limit:
        return list(nodes)
    freest = sorted(nodes, key=lambda node: -min(node.free_gpus, limit))[: run.nodes]
    return [
        replace(
            node,
            gpus=min(node.gpus, limit),
            free_gpus=min(node.free_gpus, limit),
            in_use=node.free_gpus < node.gpus,
        )
        for node in freest
    ]
