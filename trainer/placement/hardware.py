"""GPUs and nodes of a run, and the assignment of actors to GPUs, on plain data.

All GPUs of one actor are on one node. Actors of a kind share as few nodes as possible, since
neighbouring ranks exchange the most. Kinds with larger actors are placed first, since only they can
fail to find a node; among equals the trainer's ranks are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from keel.configs.schema import Config, ConfigError, RunConfig
from keel.trainer.placement.memory import GIB, gib

RANK, ENGINE, JUDGE = "trainer rank", "engine", "judge"
RANK_CPUS = 0.5
"""CPU cores that Ray books for a rank without a GPU: ranks and engines alternate there."""
SHARED_GPU = 0.5
"""Share of a GPU that Ray books for each of two actors; knobs divide its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """Peak rates of a GPU and its links, per second and direction, from data sheets."""

    name: str = "NVIDIA H200"
    flops: float = 989e12
    """Dense bfloat16."""
    memory_bytes: float = 4.8e12
    link_bytes: float = 450e9
    """Between GPUs of a node."""
    network_bytes: float = 50e9
    """One GPU's share of the network: 400 Gb/s."""
    host_bytes: float = 44e9
    """To and from pinned host memory, measured on PCIe 5; half of it is assumed for PCIe 4."""
    node_gpus: int = 8
    flash4: bool = True
    """Whether FlashAttention-4 supports the GPU: Hopper and Blackwell."""

    def between(self, gpus: int) -> float:
        """Bandwidth among that many GPUs: by links, or by network cards across nodes."""
        return self.link_bytes if gpus <= self.node_gpus else self.network_bytes


_FLASH4 = re.compile(r"\bG?[BH]\d(?!0\b)|\b[H]20\b")
"""Names of data-centre GPUs of these generations; Blackwell's for desks have other kernels."""
_PCIE4, _PCIE5 = 32.0, 64.0
_SPECS: tuple[tuple[str, float, float, float], ...] = (
    ("GB300", 2500, 8.0, 900),
    ("GB200", 2500, 8.0, 900),
    ("B300", 2250, 8.0, 900),
    ("B200", 2250, 8.0, 900),
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
"""Part of the driver's name; bfloat16 TFLOP/s; memory TB/s; link GB/s. The first match counts."""


def spec_of(name: str) -> GpuSpec:
    """Spec of a GPU by its driver's name. An unlisted one gets an H200's rates, and a note."""
    default = GpuSpec()
    if not name:
        return default
    flash4 = bool(_FLASH4.search(name))
    for part, tflops, terabytes, link in _SPECS:
        if re.search(rf"\b{part}\b", name):
            pcie5 = flash4 or link == _PCIE5
            return GpuSpec(
                name=f"NVIDIA {part}",
                flops=1e12 * tflops,
                memory_bytes=1e12 * terabytes,
                link_bytes=1e9 * link,
                host_bytes=default.host_bytes / (1 if pcie5 else 2),
                flash4=flash4,
            )
    return replace(default, name=f"{default.name} (Keel has no rates of {name})", flash4=flash4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of actors. Each has a CPU core and `gpus` GPUs, which it may share."""

    name: str
    count: int
    gpus: int
    count_knob: str
    size_knob: str = ""
    """Knob behind `gpus`, if any."""
    guest: str = ""
    """Kind of actor that shares the GPUs of each."""

    @property
    def cpus(self) -> int:
        return 2 if self.guest else 1

    @property
    def knobs(self) -> list[str]:
        """Knobs that can be lowered if the actors do not fit."""
        counted = [self.count_knob] if self.count > 1 or self.name == JUDGE else []
        return counted + [self.size_knob] * (self.size_knob != "" and self.gpus > 1)


def kinds(config: Config) -> tuple[Kind, ...]:
    """Kinds of actors that need GPUs."""
    r, t, judge = config.rollout, config.trainer, config.rewards.judge
    return (
        Kind(name=RANK, count=t.ranks, gpus=1, count_knob="trainer.ranks"),
        Kind(
            name=ENGINE,
            count=r.engines if config.data.sources else 0,  # SFT samples nothing
            gpus=r.tensor_parallel,
            count_knob="rollout.engines",
            size_knob="rollout.tensor_parallel",
        ),
        Kind(
            name=JUDGE,
            count=min(1, judge.gpus),
            gpus=judge.gpus,
            count_knob="rewards.judge.serve",
            size_knob="rewards.judge.server.tensor_parallel",
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the cluster."""

    name: str
    id: str = ""
    """Ray's id; empty before there is a cluster."""
    gpus: int
    cpus: int
    free_gpus: int
    free_cpus: float
    in_use: bool = False
    """True if others use some of its GPUs; only Ray knows which."""
    memory_gib: float = 0.0
    """Host memory; 0 if unknown."""

    def room(self, kind: Kind) -> int:
        """Number of actors of this kind that fit now."""
        return int(min(self.free_gpus // kind.gpus, self.free_cpus // kind.cpus))

    def empty(self) -> Node:
        """The node without other users."""
        return replace(self, free_gpus=self.gpus, free_cpus=self.cpus, in_use=False)

    def less(self, kind: Kind, actors: int) -> Node:
        """The node after placing actors on it."""
        return replace(
            self,
            free_gpus=self.free_gpus - kind.gpus * actors,
            free_cpus=self.free_cpus - kind.cpus * actors,
        )

    def __str__(self) -> str:
        if self.free_cpus < self.free_gpus:
            return f"{self.name} ({self.free_gpus} GPUs, {self.free_cpus:g} CPU cores)"
        return f"{self.name} ({self.free_gpus})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Hardware that a run is planned on: detected, or described by the recipe."""

    gpu: bool
    nodes: tuple[Node, ...] = ()
    """Nodes with GPUs, in their current state."""
    gpu_gib: float = 0.0
    """Memory of a GPU; 0 if unknown."""
    gpu_name: str = ""
    """The driver's name of the GPU; empty if unknown."""
    taken_gib: float = 0.0
    """Memory that other processes hold on the most used GPU."""
    found: bool = True
    """True if detected here or on the cluster."""
    assumed: bool = False
    """True if the number of GPUs is unknown, and `nodes` are just enough for the recipe."""
    note: str = ""
    """Source of the information."""
    missing: str = ""
    """Why the recipe does not fit yet: some of `nodes` are absent."""

    @property
    def signature(self) -> dict[str, Any]:
        """JSON of all that a cached choice depends on."""
        return {
            "GPUs of each node": [node.gpus for node in self.nodes],
            "GiB of a GPU": round(self.gpu_gib),
            "GiB that others hold": round(self.taken_gib),
            **({"GPU": self.gpu_name} if self.gpu_name else {}),
        }

    @property
    def spec(self) -> GpuSpec:
        spec = spec_of(self.gpu_name)
        gpus = max((node.gpus for node in self.nodes), default=spec.node_gpus)
        return replace(spec, node_gpus=max(1, gpus))

    @property
    def taken_warning(self) -> str:
        """Warning about other processes' GPU memory, or ""."""
        if not self.taken_gib:
            return ""
        return (
            f"OTHER PROCESSES HOLD {gib(self.taken_gib * GIB)} of a GPU's "
            f"{gib(self.gpu_gib * GIB)} (see nvidia-smi). The plan leaves that out; end them and "
            "start again to use all of it"
        )

    @property
    def idle(self) -> list[Node]:
        """The nodes without other users."""
        return [node.empty() for node in self.nodes]

    def __str__(self) -> str:
        sizes = [node.gpus for node in self.nodes]
        parts = [f"{sizes.count(n)} node(s) of {n} GPU(s)" for n in dict.fromkeys(sizes)]
        memory = (
            f"{gib(self.gpu_gib * GIB)} each" if self.gpu_gib else "of unknown memory (run.gpu_gib)"
        )
        taken = f", {gib(self.taken_gib * GIB)} of it taken by others" if self.taken_gib else ""
        return f"{' and '.join(parts)}, {memory}{taken}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One actor's GPUs."""

    kind: str
    index: int
    node: Node
    gpus: int
    first: int | None
    """Id of its first GPU, the others follow; None if others use the node, too."""
    shared: bool = False
    """True if an actor of another kind with the same index has the same GPUs."""

    @property
    def ids(self) -> tuple[int, ...]:
        return () if self.first is None else tuple(range(self.first, self.first + self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The seats of all actors, in the order in which each node's GPUs are assigned."""

    seats: tuple[Seat, ...]

    @property
    def shared(self) -> bool:
        """Whether engines and ranks share GPUs."""
        return any(seat.shared for seat in self.seats)

    @property
    def ranks_by_node(self) -> list[tuple[Node, int]]:
        """Nodes with trainer ranks, and how many."""
        nodes = {id(seat.node): seat.node for seat in self.seats if seat.kind == RANK}
        count = Counter(id(seat.node) for seat in self.seats if seat.kind == RANK)
        return [(node, count[key]) for key, node in nodes.items()]

    def owner(self, kind: str, index: int) -> Seat:
        """The seat that holds an actor's GPUs, possibly of the rank that it shares them with."""
        seat = next(s for s in self.seats if (s.kind, s.index) == (kind, index))
        if not seat.shared:
            return seat
        return next(s for s in self.seats if s.kind == RANK and s.index == index)

    def lines(self) -> Iterator[str]:
        """One line per node."""
        for (_, name), group in groupby(self.seats, key=lambda s: (s.node.id, s.node.name)):
            seats = sorted(group, key=lambda seat: (seat.kind, seat.index))
            parts = [_span(list(alike)) for _, alike in groupby(seats, key=lambda s: s.kind)]
            yield f"{name}: {'; '.join(parts)}"


def place(config: Config, nodes: Iterable[Node], *, only: str = "") -> Placement:
    """Assign GPUs to all actors, or to actors of the kind `only`.

    Engines share GPUs with ranks under `rollout.colocated`, and if there is a single GPU. Raises
    ConfigError if there are too few free GPUs, or no node has enough for one actor.
    """
    nodes = list(nodes)
    placed = [kind for kind in kinds(config) if kind.count and only in ("", kind.name)]
    needed = sum(kind.count * kind.gpus for kind in placed)
    available = sum(node.free_gpus for node in nodes)
    single = available == sum(node.gpus for node in nodes) <= 1
    if not only and (config.rollout.colocated or (single and needed == len(placed) == 2)):
        placed = [
            replace(kind, guest=ENGINE) if kind.name == RANK else kind
            for kind in placed
            if kind.name != ENGINE
        ]
        needed = sum(kind.count * kind.gpus for kind in placed)
    if available < needed:
        limits = (
            f" (run.gpus_per_node = {config.run.gpus_per_node}, run.nodes = {config.run.nodes})"
        )
        raise ConfigError(
            f"the recipe needs {needed} GPU(s) ({_counted(placed)}), and the cluster has "
            f"{available}{_listed(nodes)}{limits if config.run.gpus_per_node else ''}. "
            f"{_remedy(placed if available else ())}"
        )
    if not only and config.rollout.time_share and not any(kind.guest for kind in placed):
        raise ConfigError(
            "rollout.time_share: engines and trainer have separate GPUs here, so it gains "
            "nothing. Switch it off, or let them share GPUs with rollout.colocated"
        )
    remaining = dict(enumerate(nodes))
    assigned: dict[int, list[tuple[Kind, int]]] = {index: [] for index in remaining}
    for kind in sorted(placed, key=lambda kind: -kind.gpus):
        done = 0
        while done < kind.count:
            rooms = {index: node.room(kind) for index, node in remaining.items()}
            missing = kind.count - done
            enough = [index for index, room in rooms.items() if room >= missing]
            if enough:  # the smallest node that holds all of them
                index = min(enough, key=lambda i: (remaining[i].free_gpus, i))
            else:  # fill the largest
                index = max(rooms, key=lambda i: (rooms[i], -i))
            count = min(rooms[index], missing)
            if not count:
                raise ConfigError(_no_room(kind, missing, nodes, placed))
            assigned[index] += [(kind, done + i) for i in range(count)]
            remaining[index] = remaining[index].less(kind, count)
            done += count
    seats: list[Seat] = []
    for index, node in enumerate(nodes):
        first = 0
        for kind, number in assigned[index]:
            known = first if node.free_gpus == node.gpus and not node.in_use else None
            for name in filter(None, (kind.name, kind.guest)):
                seat = Seat(kind=name, index=number, node=node, gpus=kind.gpus, first=known)
                seats.append(replace(seat, shared=bool(kind.guest)))
            first += kind.gpus
    return Placement(seats=tuple(seats))


def assumed_nodes(config: Config, *, node_gpus: int) -> list[Node]:
    """The fewest nodes of `node_gpus` GPUs (or of the largest actor's) that hold the recipe."""
    placed = [kind for kind in kinds(config) if kind.count]
    size = max(node_gpus, *(kind.gpus for kind in placed))
    most = sum(-(-kind.count // (size // kind.gpus)) for kind in placed)
    for count in range(1, most):
        try:
            place(config, idle_nodes(count, size))
        except ConfigError:
            continue
        return idle_nodes(count, size)
    return idle_nodes(most, size)


def idle_nodes(count: int, gpus: int) -> list[Node]:
    """Hypothetical idle nodes with enough CPU cores."""
    return [
        Node(name=f"node {i}", gpus=gpus, cpus=2 * gpus, free_gpus=gpus, free_cpus=2 * gpus)
        for i in range(count)
    ]


def allowed(nodes: Iterable[Node], run: RunConfig) -> list[Node]:
    """The part of `nodes` that the run may use (`run.gpus_per_node`, `run.nodes`)."""
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


def _no_room(kind: Kind, missing: int, nodes: Sequence[Node], placed: Sequence[Kind]) -> str:
    largest = max(node.free_gpus for node in nodes)
    if largest < kind.gpus:
        return (
            f"{kind.size_knob or kind.count_knob} = {kind.gpus}: each {kind.name} needs its GPUs "
            f"on one node, and the largest has {largest}{_listed(nodes)}. Set it to {largest} or "
            "less"
        )
    return (
        f"{missing} of {kind.count} {kind.name}(s) of {kind.gpus} GPU(s) and a CPU core fit on no "
        f"node{_listed(nodes)}, with {_counted(placed)} in all. {_remedy(placed)}"
    )


def _remedy(placed: Iterable[Kind]) -> str:
    knobs = [knob for kind in placed for knob in kind.knobs]
    if not knobs:
        cpu = "run.device=cpu run.gpu_gib=0 run.gpus_per_node=0"
        return f"Use a machine with enough GPUs, or none ({cpu})"
    return f"Lower {', '.join(knobs)}; one engine and one rank share a single GPU"


def _counted(placed: Iterable[Kind]) -> str:
    return " and ".join(
        f"{kind.count} {kind.name}(s)"
        + (f" of {kind.gpus}" if kind.gpus > 1 else "")
        + (f" with an {kind.guest} each" if kind.guest else "")
        for kind in placed
    )


def _listed(nodes: Sequence[Node], most: int = 8) -> str:
    if not nodes:
        return ""
    more = f" and {len(nodes) - most} more" if len(nodes) > most else ""
    return ": " + ", ".join(map(str, nodes[:most])) + more


def _span(seats: Sequence[Seat]) -> str:
    """Describe seats like `engines 0–1 on GPUs 0–3 (2 each)`."""
    first, last = seats[0], seats[-1]
    many = len(seats) > 1
    actors = f"{first.kind}s {first.index}–{last.index}" if many else f"{first.kind} {first.index}"
    total = sum(seat.gpus for seat in seats)
    if first.first is None:
        gpus = f"{total} of its {first.node.gpus} GPUs"
    elif total == 1:
        gpus = f"GPU {first.first}"
    else:
        gpus = f"GPUs {first.first}–{first.first + total - 1}"
    each = f" ({first.gpus} each)" if many and first.gpus > 1 else ""
    return f"{actors} on {gpus}{each}{', shared' if first.shared else ''}"
