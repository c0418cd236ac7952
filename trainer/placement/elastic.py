"""Adapt the layout of a run to the available nodes and memory.

Each time the run starts, it uses the full recipe if it fits on the cluster, and fewer ranks and
engines otherwise. After a step runs out of memory, the run continues with settings that need less.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path

from keel.configs.diff import diff_configs, flatten_config
from keel.configs.schema import Config, ConfigError
from keel.model.load import ModelFacts
from keel.model.ray_timeouts import NODE_LOST_S, alive_nodes
from keel.trainer.placement import hardware as hardware_rules
from keel.trainer.placement.hardware import Hardware, Node, limit_nodes, place
from keel.trainer.placement.layouts import Values, choose, update_choice, with_values, yaml_value
from keel.trainer.placement.nodes import cluster_nodes
from keel.trainer.placement.watchdog import can_connect
from keel.trainer.run import checkpoint
from keel.trainer.run.errors import RESUME_HINT, OutOfMemory
from keel.trainer.run.journal import note
from keel.trainer.run.progress import waiting

_POLL_S = 2.0
_THREADS = 32
_MAX_LAYOUTS = 64
"""Maximum number of smaller configs to try, largest first. Each can take seconds."""
_RANKS, _ENGINES = "trainer.ranks", "rollout.engines"
_REMEDY = (
    f"Lower {_RANKS}, which a resumed run may do, or set trainer.min_ranks to continue with the "
    "ranks that fit"
)

_REDUCED_KNOBS = ("micro_batch_tokens", "activation_checkpointing", "keep_attention")
"""The `trainer` knobs that are changed to save memory."""
_MAX_REDUCTIONS = 3  # if more are needed, the memory model is wrong by more than a few per cent


class ElasticLayouts:
    """Decides which config to use whenever a run starts or restarts."""

    def __init__(
        self,
        config: Config,
        *,
        facts: ModelFacts,
        hardware: Hardware,
        chosen: Values,
        say: Callable[[str], object] = print,
    ) -> None:
        """`config` is the full config, and `chosen` holds the values Keel chose for its unset
        knobs."""
        self.oom_recovery = OomRecovery(config=config, folder=config.run.folder)
        """Holds the config in use. `next` replaces it."""
        self.whole, self._facts, self._hardware, self._chosen = config, facts, hardware, chosen
        self._say, self._begun = say, False

    def next(self) -> Config:
        """Return the config to use the next time the run starts.

        If the full config doesn't fit, wait for more nodes before falling back to a smaller one.
        Raises TimeoutError if not enough nodes become available in time, and ConfigError if the
        config doesn't fit and no node can join.
        """
        first, self._begun = not self._begun, True
        # No node can join a cluster that Keel starts on this machine.
        alone, shortage = first and not os.environ.get("RAY_ADDRESS"), ""
        config = whole = self._with_reductions()
        elastic, idle = not first or whole.trainer.min_ranks > 0, list[Node]()
        if elastic:
            self._wait_for_silent_nodes()
        if elastic or not self._hardware.gpu:  # else GPUs are reserved and waited for later
            nodes = cluster_nodes(gpus=self._hardware.gpu)
            idle = [node.empty() for node in nodes]
            shortage = self._shortage(whole, nodes if elastic and not alone else idle)
        if shortage and alone:
            smaller, reason = None, _REMEDY
            if self._min_ranks:
                smaller, reason = self._find_smaller_config(whole, idle)
            if smaller is None:
                raise ConfigError(f"{shortage}. {reason}")
            config = self._announce_smaller_config(smaller, shortage)
        elif shortage:
            config = self._wait(whole, shortage)
        self.oom_recovery.config = config
        self.oom_recovery.fewer = config.trainer.ranks < whole.trainer.ranks
        return config

    @property
    def _min_ranks(self) -> int:
        return self.whole.trainer.min_ranks or int(_RANKS in self._chosen)

    def _with_reductions(self) -> Config:
        if not self.oom_recovery.times:
            return self.whole
        now, trainer = self.oom_recovery.config.trainer, self.whole.trainer
        reduced = {name: getattr(now, name) for name in _REDUCED_KNOBS}
        tokens = min(now.micro_batch_tokens, trainer.micro_batch_tokens)
        trainer = replace(trainer, **{**reduced, "micro_batch_tokens": tokens})
        return replace(self.whole, trainer=trainer)

    def _wait_for_silent_nodes(self) -> None:
        """Wait until every unresponsive node either responds again or is declared lost by Ray.
        Until then, Ray would still start actors on it."""
        began, warned = time.monotonic(), False
        while (silent := _silent_nodes()) and time.monotonic() - began < NODE_LOST_S:
            if not warned:
                warned = True
                self._record_warning(
                    "restart",
                    f"node {', '.join(silent)} does not answer. The run starts once it does, or "
                    "once Ray has given it up, after about 65 s",
                )
            time.sleep(_POLL_S)

    def _shortage(self, config: Config, nodes: Sequence[Node]) -> str:
        if self._hardware.gpu:
            try:
                place(config, limit_nodes(nodes, config.run))
            except ConfigError as error:
                return str(error)
            return ""
        ranks, each = config.trainer.ranks, hardware_rules.RANK_CPUS
        if sum(int(node.free_cpus / each) for node in nodes) >= ranks:
            return ""
        return (
            f"the recipe needs {ranks} trainer ranks of {each:g} CPU cores, and the cluster "
            f"has {sum(node.free_cpus for node in nodes):g} free cores"
        )

    def _wait(self, whole: Config, shortage: str) -> Config:
        run, min_ranks = whole.run, self._min_ranks
        timeout_s, reason = run.startup_timeout_s, _REMEDY
        future = f"After {timeout_s:g} s (run.startup_timeout_s) the run ends. {_REMEDY}"
        if min_ranks:
            timeout_s, reason = max(timeout_s, run.elastic_wait_s + 2 * _POLL_S), ""
            future = (
                f"After {run.elastic_wait_s:g} s (run.elastic_wait_s) the run continues with the "
                f"ranks that fit, at least {min_ranks} of {whole.trainer.ranks}"
            )
        self._record_warning("restart", f"the run waits for room: {shortage}. {future}")
        began, tried = time.monotonic(), None
        with waiting("waiting for room on the cluster"):
            while (waited_s := time.monotonic() - began) < timeout_s:
                time.sleep(min(_POLL_S, timeout_s - waited_s))
                nodes = cluster_nodes(gpus=self._hardware.gpu)
                if not (shortage := self._shortage(whole, nodes)):
                    return whole
                late = time.monotonic() - began >= run.elastic_wait_s
                if min_ranks and late and nodes != tried:
                    tried = nodes
                    config, reason = self._find_smaller_config(whole, nodes)
                    if config is not None:
                        return self._announce_smaller_config(config, shortage)
        raise TimeoutError(
            f"no room after {timeout_s:g} s: {shortage}{reason and '. ' + reason}. "
            f"{RESUME_HINT.capitalize()}"
        )

    def _announce_smaller_config(self, config: Config, shortage: str) -> Config:
        before = self._with_reductions()
        old, new = flatten_config(before), flatten_config(config)
        parts = [
            f"{knob} is now {yaml_value(new[knob])}, not {yaml_value(old[knob])}"
            for knob in diff_configs(before, config)
        ]
        self._record_warning(
            "fewer",
            "the run continues with less until its next start, which uses everything again if it "
            f"fits: {', '.join(parts)} ({shortage})",
        )
        return config

    def _find_smaller_config(
        self, whole: Config, nodes: Sequence[Node]
    ) -> tuple[Config | None, str]:
        limited, gpus = limit_nodes(nodes, whole.run), None
        free = [replace(node, gpus=node.free_gpus, cpus=int(node.free_cpus)) for node in limited]
        if self._hardware.gpu:
            gpus = sum(node.gpus for node in free) - whole.rewards.judge.gpus
        hardware = replace(self._hardware, nodes=tuple(node for node in free if node.gpus))
        open_knobs, sizes = frozenset(self._chosen), frozenset({_RANKS, _ENGINES})
        if self.oom_recovery.times:
            open_knobs -= {f"trainer.{name}" for name in _REDUCED_KNOBS}
        smaller = _smaller_configs(whole, self._min_ranks, gpus=gpus)
        candidates = ((config, open_knobs - sizes) for config in smaller)
        if sizes <= open_knobs and hardware.nodes:
            # First try the fastest layout of all, which may let engines and ranks share GPUs.
            candidates = chain([(whole, open_knobs)], candidates)
        reason = f"No layout of at least {self._min_ranks} ranks (trainer.min_ranks) fits there"
        for config, knobs in islice(candidates, _MAX_LAYOUTS):
            if not sizes <= knobs and self._shortage(config, limited):
                continue
            try:
                chosen = choose(config, knobs, self._facts, hardware).config
            except ConfigError as error:
                reason = str(error)
                continue
            if chosen.trainer.ranks >= self._min_ranks and not self._shortage(chosen, limited):
                return chosen, ""
        return None, reason

    def _record_warning(self, kind: str, line: str) -> None:
        folder = self.oom_recovery.folder
        latest = checkpoint.latest(folder / "checkpoints")
        note(folder, checkpoint.step_of(latest) if latest else 0, kind, line)
        self._say(f"warning: {line}")


def _silent_nodes() -> list[str]:
    nodes = alive_nodes()
    addresses = [f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}" for node in nodes]
    with ThreadPoolExecutor(_THREADS) as threads:
        answers = zip(nodes, threads.map(can_connect, addresses), strict=True)
        return [node["NodeManagerHostname"] for node, answer in answers if not answer]


def _smaller_configs(config: Config, min_ranks: int, *, gpus: int | None) -> Iterator[Config]:
    """Yield configs with fewer ranks or engines, starting with those that keep the largest fraction
    of both. Ranks that share experts or contexts stay together. `gpus` is the total number of GPUs
    for ranks and engines, or None on CPUs."""
    trainer, rollout = config.trainer, config.rollout
    samples, width = bool(config.data.sources), rollout.tensor_parallel
    unit = math.lcm(trainer.expert_parallel, trainer.sequence_parallel)
    sizes: list[tuple[float, int, int]] = []
    for ranks in range(trainer.ranks, min_ranks - 1, -1):
        if ranks % unit:
            continue
        engines = -(-rollout.engines * ranks // trainer.ranks)
        if rollout.colocated:
            engines = ranks
        elif samples and gpus is not None and not (ranks == gpus == 1):  # one GPU is shared
            engines = min(rollout.engines, (gpus - ranks) // width)
        if engines < 1 or (ranks, engines) == (trainer.ranks, rollout.engines):
            continue
        share = min(ranks / trainer.ranks, engines / rollout.engines if samples else 1.0)
        sizes.append((share, ranks, engines))
    for _, ranks, engines in sorted(sizes, reverse=True):
        with suppress(ConfigError):
            yield with_values(config, {_RANKS: ranks, _ENGINES: engines})


@dataclass(kw_only=True)
class OomRecovery:
    """Holds a run's current config and lowers its memory use when a step runs out of memory."""

    config: Config
    folder: Path
    times: int = 0
    fewer: bool = False
    """True if the run has fewer ranks or engines than its recipe asks for (`elastic`)."""

    def reduce_memory(self, error: OutOfMemory) -> str:
        """Lower the config's memory use, save the change in the run folder, and return a message
        for the user. Raises `error` if there is nothing left to lower."""
        reduced = _with_less_memory(self.config) if self.times < _MAX_REDUCTIONS else None
        if reduced is None:
            raise error
        before, now = self.config.trainer, reduced.trainer
        self.config, self.times = reduced, self.times + 1
        values = {name: getattr(now, name) for name in _REDUCED_KNOBS}
        update_choice(self.folder, {f"trainer.{name}": value for name, value in values.items()})
        changes = ", ".join(
            f"trainer.{name} is now {yaml_value(value)}, not {yaml_value(getattr(before, name))}"
            for name, value in values.items()
            if value != getattr(before, name)
        )
        return f"{error}\nOut of memory: {changes}, for the rest of the run"


def _with_less_memory(config: Config) -> Config | None:
    """Halve a config's micro-batch size. If that isn't possible, turn on activation checkpointing,
    and after that, stop keeping attention outputs. Returns None if nothing is left to change."""
    trainer, least = config.trainer, config.max_context
    if trainer.micro_batch_tokens > least:
        trainer = replace(trainer, micro_batch_tokens=max(least, trainer.micro_batch_tokens // 2))
    elif not trainer.activation_checkpointing:
        trainer = replace(trainer, activation_checkpointing=True)
    elif trainer.keeps_attention:
        trainer = replace(trainer, keep_attention=False)
    else:
        return None
    return replace(config, trainer=trainer)
