"""Assigns actors to GPUs, on plain data; `reservation` makes Ray follow the assignment.

All GPUs of one actor are on one node. Actors of a kind stay together on as few nodes as they can:
neighbouring ranks exchange the most. Kinds with large actors choose first, since only they can fail
to find a node; among equals the trainer's ranks do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from keel.configs.schema import Config, ConfigError, RunConfig
from keel.trainer.placement.gpus import Machine, machine_of
from keel.trainer.placement.memory import GIB, gib

RANK, ENGINE, JUDGE = "trainer rank", "engine", "judge"
RANK_CPUS = 0.5
"""CPU cores that Ray books for a rank without a GPU: ranks and engines alternate there."""
SHARED = 0.5
"""Share of a GPU that Ray books for each of two actors. Memory is the recipe's to divide:
`rollout.gpu_memory_utilization` bounds the engine, the trainer takes what it needs of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Actors that are alike. Each has a CPU core and `gpus` GPUs, which it may share."""

    name: str
    count: int
    gpus: int
    count_knob: str
    size_knob: str = ""
    """The knob behind `gpus`; empty where it is fixed."""
    guest: str = ""
    """The kind that has a place on the same GPUs, one beside each."""

    @property
    def cpus(self) -> int:
        return 2 if self.guest else 1

    @property
    def knobs(self) -> list[str]:
        """What can be lowered where they do not fit."""
        counted = [self.count_knob] if self.count > 1 or self.name == JUDGE else []
        return counted + [self.size_knob] * (self.size_knob != "" and self.gpus > 1)


def kinds(config: Config) -> tuple[Kind, ...]:
    """Who needs GPUs. Another kind of actor is another entry here."""
    r, t, judge = config.rollout, config.trainer, config.rewards.judge
    return (
        Kind(name=RANK, count=t.ranks, gpus=1, count_knob="trainer.ranks"),
        Kind(
            name=ENGINE,
            count=r.engines if config.data.sources else 0,  # supervised: nothing is sampled
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
    """A machine of the cluster that has GPUs."""

    name: str
    id: str = ""
    """Ray's own; empty where there is no cluster yet."""
    gpus: int
    cpus: int
    free_gpus: int
    free_cpus: float
    """A rank without a GPU takes half a core."""
    in_use: bool = False
    """Others have some of its GPUs, and Ray alone knows which."""
    memory_gib: float = 0.0
    """Of the machine, beside its GPUs; 0: nobody knows."""

    def room(self, kind: Kind) -> int:
        """Actors of this kind that find a place here now."""
        return int(min(self.free_gpus // kind.gpus, self.free_cpus // kind.cpus))

    def empty(self) -> Node:
        """The node as it is when nobody else uses it."""
        return replace(self, free_gpus=self.gpus, free_cpus=self.cpus, in_use=False)

    def less(self, kind: Kind, actors: int) -> Node:
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
    """What a run is planned on: found, or said by the recipe (`keel.trainer.placement.nodes`)."""

    gpu: bool
    nodes: tuple[Node, ...] = ()
    """Those with GPUs, as they are now."""
    gpu_gib: float = 0.0
    """Memory of a GPU; 0: nobody knows."""
    gpu_name: str = ""
    """As its driver says it; empty: nobody knows."""
    taken_gib: float = 0.0
    """Of that, what processes of others hold, on the GPU where it is most."""
    found: bool = True
    """It is where the command runs, or the cluster that this has joined."""
    assumed: bool = False
    """How many GPUs there are, nobody knows: these are nodes enough for the recipe."""
    note: str = ""
    """What it is and who says so."""
    missing: str = ""
    """Why the recipe finds no room now: some of these nodes are not there yet, or not any more."""

    @property
    def signature(self) -> dict[str, Any]:
        """What a choice for it depends on, for JSON."""
        return {
            "GPUs of each node": [node.gpus for node in self.nodes],
            "GiB of a GPU": round(self.gpu_gib),
            "GiB that others hold": round(self.taken_gib),
            **({"GPU": self.gpu_name} if self.gpu_name else {}),
        }

    @property
    def machine(self) -> Machine:
        """What its GPUs can do, and how many a node has."""
        here = machine_of(self.gpu_name)
        most = max((node.gpus for node in self.nodes), default=here.node_gpus)
        return replace(here, node_gpus=max(1, most))

    @property
    def taken_said(self) -> str:
        """One line where processes of others hold memory of its GPUs."""
        if not self.taken_gib:
            return ""
        return (
            f"PROCESSES OF OTHERS HOLD {gib(self.taken_gib * GIB)} of the "
            f"{gib(self.gpu_gib * GIB)} of a GPU here (nvidia-smi names them). The plan leaves "
            "that out; end them, and start again for all of the GPU"
        )

    @property
    def idle(self) -> list[Node]:
        """The nodes as they are when nobody else uses them."""
        return [node.empty() for node in self.nodes]

    def __str__(self) -> str:
        sizes = [node.gpus for node in self.nodes]
        parts = [f"{sizes.count(n)} node(s) of {n} GPU(s)" for n in dict.fromkeys(sizes)]
        each = (
            f"{gib(self.gpu_gib * GIB)} each" if self.gpu_gib else "of unknown memory (run.gpu_gib)"
        )
        taken = f", {gib(self.taken_gib * GIB)} of it taken by others" if self.taken_gib else ""
        return f"{' and '.join(parts)}, {each}{taken}: {self.note}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """One actor's place."""

    kind: str
    index: int
    node: Node
    gpus: int
    first: int | None
    """Id of the first of its GPUs, which are consecutive; None where others use the node, too, and
    Ray alone knows which are free."""
    shared: bool = False
    """With the seat of the same index of another kind."""

    @property
    def ids(self) -> tuple[int, ...]:
        return () if self.first is None else tuple(range(self.first, self.first + self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    seats: tuple[Seat, ...]
    """In the order that GPUs are handed out on each node."""

    @property
    def shared(self) -> bool:
        """Whether engines and ranks have the same GPUs."""
        return any(seat.shared for seat in self.seats)

    @property
    def ranks_by_node(self) -> list[tuple[Node, int]]:
        """Nodes, and how many trainer ranks each has."""
        nodes = {id(seat.node): seat.node for seat in self.seats if seat.kind == RANK}
        count = Counter(id(seat.node) for seat in self.seats if seat.kind == RANK)
        return [(node, count[key]) for key, node in nodes.items()]

    def owner(self, kind: str, index: int) -> Seat:
        """Who a seat's GPUs were reserved for: itself, or the rank whose guest it is."""
        seat = next(s for s in self.seats if (s.kind, s.index) == (kind, index))
        if not seat.shared:
            return seat
        return next(s for s in self.seats if s.kind == RANK and s.index == index)

    def lines(self) -> Iterator[str]:
        """Who sits where, one line a node."""
        for (_, name), group in groupby(self.seats, key=lambda s: (s.node.id, s.node.name)):
            seats = sorted(group, key=lambda seat: (seat.kind, seat.index))
            parts = [_span(list(alike)) for _, alike in groupby(seats, key=lambda s: s.kind)]
            yield f"{name}: {'; '.join(parts)}"


def place(config: Config, nodes: Iterable[Node], *, only: str = "") -> Placement:
    """GPUs of their own for all actors, or an engine beside each rank (`rollout.colocated`; on a
    single GPU one engine and one rank share it in any case). only: for actors of this kind, without
    the others of the recipe.

    Raises ConfigError if the free GPUs are too few, or no node has enough for one actor.
    """
    nodes = list(nodes)
    wanted = [kind for kind in kinds(config) if kind.count and only in ("", kind.name)]
    needed = sum(kind.count * kind.gpus for kind in wanted)
    available = sum(node.free_gpus for node in nodes)
    single = available == sum(node.gpus for node in nodes) <= 1
    if not only and (config.rollout.colocated or (single and needed == len(wanted) == 2)):
        wanted = [
            replace(kind, guest=ENGINE) if kind.name == RANK else kind
            for kind in wanted
            if kind.name != ENGINE
        ]
        needed = sum(kind.count * kind.gpus for kind in wanted)
    if available < needed:
        raise ConfigError(
            f"the recipe needs {needed} GPU(s) ({_counted(wanted)}), and the cluster has "
            f"{available}{_listed(nodes)}{_said(config.run)}. {_fewer(wanted if available else ())}"
        )
    if not only and config.rollout.time_share and not any(kind.guest for kind in wanted):
        raise ConfigError(
            "rollout.time_share: engines and trainer have separate GPUs here, so it gains nothing. "
            "Switch it off, or let them share GPUs with rollout.colocated"
        )
    left = dict(enumerate(nodes))
    taken: dict[int, list[tuple[Kind, int]]] = {index: [] for index in left}
    for kind in sorted(wanted, key=lambda kind: -kind.gpus):
        done = 0
        while done < kind.count:
            rooms = {index: node.room(kind) for index, node in left.items()}
            missing = kind.count - done
            enough = [index for index, room in rooms.items() if room >= missing]
            # The smallest that holds all of them; else as many as the largest holds.
            if enough:
                index = min(enough, key=lambda i: (left[i].free_gpus, i))
            else:
                index = max(rooms, key=lambda i: (rooms[i], -i))
            count = min(rooms[index], missing)
            if not count:
                raise ConfigError(_no_room(kind, missing, nodes, wanted))
            taken[index] += [(kind, done + i) for i in range(count)]
            left[index] = left[index].less(kind, count)
            done += count
    seats: list[Seat] = []
    for index, node in enumerate(nodes):
        first = 0
        for kind, number in taken[index]:
            known = first if node.free_gpus == node.gpus and not node.in_use else None
            for name in filter(None, (kind.name, kind.guest)):
                seat = Seat(kind=name, index=number, node=node, gpus=kind.gpus, first=known)
                seats.append(replace(seat, shared=bool(kind.guest)))
            first += kind.gpus
    return Placement(seats=tuple(seats))


def assumed_nodes(config: Config, *, node_gpus: int) -> list[Node]:
    """As many nodes of `node_gpus` GPUs (or of the largest actor's) as it takes, to plan on without
    a cluster."""
    wanted = [kind for kind in kinds(config) if kind.count]
    size = max(node_gpus, *(kind.gpus for kind in wanted))
    most = sum(-(-kind.count // (size // kind.gpus)) for kind in wanted)
    for count in range(1, most):
        try:
            place(config, idle_nodes(count, size))
        except ConfigError:
            continue
        return idle_nodes(count, size)
    return idle_nodes(most, size)


def idle_nodes(count: int, gpus: int) -> list[Node]:
    """Nodes that nobody has seen, with CPU cores enough."""
    return [
        Node(name=f"node {i}", gpus=gpus, cpus=2 * gpus, free_gpus=gpus, free_cpus=2 * gpus)
        for i in range(count)
    ]


def allowed(nodes: Iterable[Node], run: RunConfig) -> list[Node]:
    """As much of `nodes` as the run may use (`run.gpus_per_node`, `run.nodes`)."""
    most = run.gpus_per_node
    if not most:
        return list(nodes)
    freest = sorted(nodes, key=lambda node: -min(node.free_gpus, most))[: run.nodes]
    return [
        replace(
            node,
            gpus=min(node.gpus, most),
            free_gpus=min(node.free_gpus, most),
            in_use=node.free_gpus < node.gpus,
        )
        for node in freest
    ]


def _no_room(kind: Kind, missing: int, nodes: Sequence[Node], wanted: Sequence[Kind]) -> str:
    largest = max(node.free_gpus for node in nodes)
    if largest < kind.gpus:
        knob = kind.size_knob or kind.count_knob
        return (
            f"{knob} = {kind.gpus}: each {kind.name} needs its GPUs on one node, and the "
            f"largest has {largest}{_listed(nodes)}. Set it to {largest} or less"
        )
    return (
        f"{missing} of {kind.count} {kind.name}(s) of {kind.gpus} GPU(s) and a CPU core find no "
        f"node that has so much left{_listed(nodes)}, for {_counted(wanted)}. {_fewer(wanted)}"
    )


def _fewer(wanted: Iterable[Kind]) -> str:
    """What makes them fewer."""
    knobs = [knob for kind in wanted for knob in kind.knobs]
    if not knobs:
        cpu = "run.device=cpu run.gpu_gib=0 run.gpus_per_node=0"
        return f"Start it where there are as many, or without GPUs ({cpu})"
    return f"Lower {', '.join(knobs)}; with one engine and one rank, a single GPU is shared"


def _said(run: RunConfig) -> str:
    if not run.gpus_per_node:
        return ""
    return f" (run.gpus_per_node = {run.gpus_per_node}, run.nodes = {run.nodes})"


def _counted(wanted: Iterable[Kind]) -> str:
    return " and ".join(
        f"{kind.count} {kind.name}(s)"
        + (f" of {kind.gpus}" if kind.gpus > 1 else "")
        + (f" with an {kind.guest} each" if kind.guest else "")
        for kind in wanted
    )


def _listed(nodes: Sequence[Node], most: int = 8) -> str:
    if not nodes:
        return ""
    more = f" and {len(nodes) - most} more" if len(nodes) > most else ""
    return ": " + ", ".join(map(str, nodes[:most])) + more


def _span(seats: Sequence[Seat]) -> str:
    """`engines 0–1 on GPUs 0–3 (2 each)`."""
    first, last = seats[0], seats[-1]
    many = len(seats) > 1
    who = f"{first.kind}s {first.index}–{last.index}" if many else f"{first.kind} {first.index}"
    total = sum(seat.gpus for seat in seats)
    if first.first is None:
        where = f"{total} of its {first.node.gpus} GPUs"
    elif total == 1:
        where = f"GPU {first.first}"
    else:
        where = f"GPUs {first.first}–{first.first + total - 1}"
    each = f" ({first.gpus} each)" if many and first.gpus > 1 else ""
    shared = ", shared" if first.shared else ""
    return f"{who} on {where}{each}{shared}"
