"""What a run starts on: all that its recipe asks for, once there is room for it; and if there is
none in time, as after the loss of a node, fewer ranks and engines, where the recipe allows."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

from keel.configs.diff import diff_configs, flatten_config
from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts
from keel.model.ray_timeouts import CALL_S, bounded
from keel.trainer.placement import hardware
from keel.trainer.placement.choose import choose, said
from keel.trainer.placement.hardware import Hardware, Node, allowed, place
from keel.trainer.placement.node_monitor import reached
from keel.trainer.placement.nodes import cluster_nodes
from keel.trainer.placement.oom_recovery import LOWERED, OomRecovery
from keel.trainer.placement.options import Values, with_values
from keel.trainer.run import checkpoint
from keel.trainer.run.journal import note
from keel.trainer.run.progress import waiting
from keel.trainer.run.restarts import RESUME_HINT

LOOK_S = 2.0
"""Between two looks at what there is."""
GIVEN_UP_S = 90.0
"""Ray has given up a node that is gone by then."""
AT_ONCE = 32
"""Nodes that are knocked at."""
TRIED = 64
"""Layouts at most, the best first: each may be a search of seconds."""
RANKS, ENGINES = "trainer.ranks", "rollout.engines"
CURES = (
    f"A smaller {RANKS}, also for a run that is resumed, takes less room; with trainer.min_ranks a "
    "start continues with as many ranks as fit"
)
"""Where it may not have fewer."""


@dataclass(kw_only=True)
class ElasticLayouts:
    """Of a run, each time that it starts."""

    lowering: OomRecovery
    """Has the recipe as it is by now, and is told what it becomes here."""
    whole: Config
    """As the run began."""
    facts: ModelFacts
    hardware: Hardware
    chosen: Values = field(default_factory=dict[str, Any])
    """Of knobs that the recipe left open."""
    say: Callable[[str], object] = print
    nodes: Callable[[], list[Node]] = cluster_nodes
    """What is free of the cluster."""
    silent: Callable[[], list[str]] = list[str]
    """Hosts of nodes that Ray takes for alive, and which do not answer."""
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep
    joinable: bool = True
    """Whether nodes may join the cluster. None joins one that Keel has started on this machine."""
    _begun: bool = False

    def next(self) -> Config:
        """The recipe to start with. Waits for room where a run has lost it, may have less, or needs
        cores that the cluster has not; raises TimeoutError where there is none in time, neither for
        all nor for what the recipe allows, and ConfigError where none can come."""
        whole, first, self._begun = self._undiminished(), not self._begun, True
        alone = first and not self.joinable  # nobody uses the cluster yet, and no node joins it
        lacking = ""
        if not first or whole.trainer.min_ranks:
            self._wait_for_silent_ones()
            lacking = self._lacking(whole, self._idle() if alone else self.nodes())
        elif not self.hardware.gpu:  # GPUs are reserved later, and waited for then
            lacking = self._lacking(whole, self._idle())
        config = whole
        if lacking:
            config = self._at_once(whole, lacking) if alone else self._waited(whole, lacking)
        self.lowering.config = config
        self.lowering.fewer = config.trainer.ranks < whole.trainer.ranks
        return config

    def _wait_for_silent_ones(self) -> None:
        """Ray would put actors on a node that is gone until it has given it up."""
        began, told = self.clock(), False
        while (silent := self.silent()) and self.clock() - began < GIVEN_UP_S:
            if not told:
                told = True
                self._tell(
                    "restart",
                    f"node {', '.join(silent)} does not answer. The run starts when it does, or "
                    "when Ray has given it up, after about 65 s",
                )
            self.pause(LOOK_S)

    @property
    def least(self) -> int:
        """Ranks with which it may go on; 0: it may not with less than all."""
        return self.whole.trainer.min_ranks or int(RANKS in self.chosen)

    def _undiminished(self) -> Config:
        """With all ranks and engines; what did not fit before does not now."""
        if not self.lowering.times:
            return self.whole
        now, trainer = self.lowering.config.trainer, self.whole.trainer
        trainer = replace(
            trainer,
            micro_batch_tokens=min(now.micro_batch_tokens, trainer.micro_batch_tokens),
            activation_checkpointing=now.activation_checkpointing,
            keep_attention=now.keep_attention,
        )
        return replace(self.whole, trainer=trainer)

    def _idle(self) -> list[Node]:
        """As if nobody else used them."""
        return [node.empty() for node in self.nodes()]

    def _lacking(self, config: Config, nodes: Sequence[Node]) -> str:
        """Why it finds no place; "" if it does."""
        if self.hardware.gpu:
            try:
                place(config, allowed(nodes, config.run))
            except ConfigError as error:
                return str(error)
            return ""
        room = sum(int(node.free_cpus / hardware.RANK_CPUS) for node in nodes)
        if room >= config.trainer.ranks:
            return ""
        cores = sum(node.free_cpus for node in nodes)
        return (
            f"the recipe needs {config.trainer.ranks} trainer ranks of {hardware.RANK_CPUS:g} CPU "
            f"cores, and the cluster has {cores:g} for them"
        )

    def _waited(self, whole: Config, lacking: str) -> Config:
        run, least = whole.run, self.least
        longest = run.startup_timeout_s
        if least:
            longest = max(longest, run.elastic_wait_s + 2 * LOOK_S)
            then = (
                f"After {run.elastic_wait_s:g} s (run.elastic_wait_s) the run continues with "
                f"as many ranks as fit, {least} of {whole.trainer.ranks} at least"
            )
        else:
            then = f"After {longest:g} s (run.startup_timeout_s) the run ends. {CURES}"
        self._tell("restart", f"the run waits for room: {lacking}. {then}")
        began, tried, why = self.clock(), None, "" if least else CURES
        with waiting("waiting for room on the cluster"):
            while (waits := self.clock() - began) < longest:
                self.pause(min(LOOK_S, longest - waits))
                nodes = self.nodes()
                if not (lacking := self._lacking(whole, nodes)):
                    return whole
                late = self.clock() - began >= run.elastic_wait_s
                if least and late and nodes != tried:
                    tried = nodes
                    config, why = self._fewer(whole, nodes)
                    if config is not None:
                        return self._less(whole, config, lacking)
        raise TimeoutError(
            f"waited {longest:g} s{'' if least else ' (run.startup_timeout_s)'} for room: "
            f"{lacking}{why and '. ' + why}. {RESUME_HINT.capitalize()}"
        )

    def _at_once(self, whole: Config, lacking: str) -> Config:
        """As after the wait, where nothing is to be waited for."""
        config, why = self._fewer(whole, self._idle()) if self.least else (None, CURES)
        if config is None:
            raise ConfigError(f"{lacking}. {why}")
        return self._less(whole, config, lacking)

    def _less(self, whole: Config, config: Config, lacking: str) -> Config:
        self._tell("fewer", f"{changes(whole, config)} ({lacking})")
        return config

    def _fewer(self, whole: Config, nodes: Sequence[Node]) -> tuple[Config | None, str]:
        """With as many ranks and engines as there is room for; None, and why, where the recipe or
        a GPU's memory forbids it."""
        free = [
            replace(node, gpus=node.free_gpus, cpus=int(node.free_cpus))
            for node in allowed(nodes, whole.run)
        ]
        hardware = replace(self.hardware, nodes=tuple(n for n in free if n.gpus))
        left = frozenset(self.chosen)
        if self.lowering.times:
            left -= {f"trainer.{name}" for name in LOWERED}
        fixed = left - {RANKS, ENGINES}
        why = f"No layout of {self.least} ranks or more (trainer.min_ranks) finds room there"
        tries: Iterator[tuple[Config, frozenset[str]]] = (
            (config, fixed) for config in smaller(whole, self.least, gpus=self._gpus(free, whole))
        )
        if {RANKS, ENGINES} <= left and free:
            tries = iter([(whole, left), *tries])
        for tried, (config, open_) in enumerate(tries):
            if tried == TRIED:
                break
            if self._lacking(config, free) and open_ == fixed:
                continue
            try:
                found = choose(config, open_, self.facts, hardware).config
            except ConfigError as error:
                why = str(error)
                continue
            if found.trainer.ranks < self.least:
                continue
            return found, ""
        return None, why

    def _gpus(self, nodes: Sequence[Node], config: Config) -> int | None:
        if not self.hardware.gpu:
            return None
        return sum(node.gpus for node in nodes) - config.rewards.judge.gpus

    def _tell(self, kind: str, line: str) -> None:
        folder = self.lowering.folder
        latest = checkpoint.latest(folder / "checkpoints")
        note(folder, checkpoint.step_of(latest) if latest else 0, kind, line)
        self.say(f"warning: {line}")


def elastic_layouts(
    config: Config,
    folder: Path,
    *,
    facts: ModelFacts,
    hardware: Hardware,
    chosen: Values,
    say: Callable[[str], object] = print,
) -> ElasticLayouts:
    """Of a run that begins, on the cluster that it is on by then."""
    return ElasticLayouts(
        lowering=OomRecovery(config=config, folder=folder),
        whole=config,
        facts=facts,
        hardware=hardware,
        chosen=chosen,
        say=say,
        nodes=lambda: cluster_nodes(gpus=hardware.gpu),
        silent=silent_nodes,
        joinable=bool(os.environ.get("RAY_ADDRESS")),
    )


def silent_nodes() -> list[str]:
    """Hosts of the cluster's nodes that cannot be reached, though Ray has not given them up yet."""
    nodes = [n for n in bounded(ray.nodes, CALL_S, "list its nodes") if n["Alive"]]
    with ThreadPoolExecutor(AT_ONCE) as threads:
        there = threads.map(
            lambda node: reached(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"), nodes
        )
        return [
            node["NodeManagerHostname"]
            for node, answers in zip(nodes, there, strict=True)
            if not answers
        ]


def smaller(config: Config, least: int, *, gpus: int | None) -> Iterator[Config]:
    """With fewer ranks (`least` at least) or engines, those first that keep the most of both;
    what shares experts or contexts stays whole. gpus: for both together; None: a CPU."""
    trainer, rollout = config.trainer, config.rollout
    sampled, width = bool(config.data.sources), rollout.tensor_parallel
    unit = math.lcm(trainer.expert_parallel, trainer.sequence_parallel)
    found: list[tuple[float, int, int]] = []
    for ranks in range(trainer.ranks, least - 1, -1):
        if ranks % unit:
            continue
        engines = -(-rollout.engines * ranks // trainer.ranks)
        if rollout.colocated:
            engines = ranks
        elif sampled and gpus is not None and not (ranks == gpus == 1):  # which is shared
            engines = min(rollout.engines, (gpus - ranks) // width)
        if engines < 1 or (ranks, engines) == (trainer.ranks, rollout.engines):
            continue
        kept = min(ranks / trainer.ranks, engines / rollout.engines if sampled else 1.0)
        found.append((kept, ranks, engines))
    for _, ranks, engines in sorted(found, reverse=True):
        with suppress(ConfigError):
            yield with_values(config, {RANKS: ranks, ENGINES: engines})


def changes(before: Config, now: Config) -> str:
    """`trainer.ranks is now 2, not 4`, and whatever else is another."""
    old, new = flatten_config(before), flatten_config(now)
    parts = [
        f"{knob} is now {said(new[knob])}, not {said(old[knob])}"
        for knob in diff_configs(before, now)
    ]
    return (
        "the run continues with less until its next start, which uses all again where there is "
        f"room: {', '.join(parts)}"
    )
