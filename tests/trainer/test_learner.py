"""The driver's learner without Ray, and failed starts; `test_learner_on_ray.py` has the rest."""

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from ray.exceptions import (
    ActorDiedError,
    GetTimeoutError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
)
from torch import Tensor, nn

from keel.configs.schema import Config
from keel.model import ray_timeouts
from keel.model.load import ModelFacts
from keel.rl.futures import failed
from keel.rl.metrics import Mean, values
from keel.rl.packing import TrainBatch
from keel.rl.sft import SftExample, plan_sft, supervised_segment
from keel.rollout.spec import EngineError
from keel.trainer import launch as system
from keel.trainer.learner import Learner, StepReport, plan_batches
from keel.trainer.nonfinite import (
    NanTracer,
    SkipCounter,
    describe_findings,
)
from keel.trainer.placement.hardware import Hardware
from keel.trainer.rank_calls import STEP, CallDeadline, RankCalls
from keel.trainer.run.errors import CollectiveTimeout, OutOfMemory, WorkerLost
from tests.rl.packed import pack
from tests.rl.rollouts import scored, segment, trajectory
from tests.trainer.engine.ranks import make_config
from tests.trainer.placement.shapes import MOE, machine, recipe
from tests.waiting import PATIENCE_S


class Ranks:
    """Scripted answers of two ranks on a fake clock, without Ray."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: tuple[float, Any]) -> None:
        """answers: delay in seconds and reply of each rank."""
        self.now, self.fetched_s, self._answers = 0.0, 60.0, dict(enumerate(answers))
        """fetched_s: timeout needed to fetch a result."""
        self.calls: list[tuple[Any, ...]] = []
        """The rank and arguments of each call."""
        calls = [SimpleNamespace(remote=partial(self._call, rank)) for rank in self._answers]
        self._actors = [
            SimpleNamespace(pack=call, step=call, evaluate_nll=call, send_weights=call)
            for call in calls
        ]
        patch.setattr(ray_timeouts, "wait", self._wait)
        patch.setattr(ray_timeouts, "get", self._get)
        patience = ray_timeouts.Deadline
        patch.setattr(ray_timeouts, "Deadline", lambda s, *_: patience(s, 1e9, lambda: self.now))

    def learner(self, config: Config, *, direct: bool = False) -> Learner:
        learner = object.__new__(Learner)
        learner._config, learner._senders = config, []
        learner._ranks = RankCalls(self._actors, config, direct=direct)
        return learner

    def ask(self, learner: Learner, seconds: float, what: str = "a step") -> list[Any]:
        return learner._ranks.call_all(
            "step", deadline=CallDeadline(what, seconds, "trainer.timeout_s")
        )

    def _call(self, rank: int, *arguments: Any) -> int:
        self.calls.append((rank, *arguments))
        return rank

    def _wait(
        self, refs: Sequence[int], *, seconds: ray_timeouts.Deadline
    ) -> tuple[list[int], list[int]]:
        first = min(refs, key=lambda ref: self._answers[ref][0])
        until, self.now = self.now + seconds.remaining(), max(self.now, self._answers[first][0])
        if self.now <= until:
            return [first], []
        self.now = until
        return [], []

    def _get(self, ref: int, *, seconds: float) -> Any:
        if seconds < self.fetched_s:
            self.now += seconds
            raise GetTimeoutError("late")
        if isinstance(answer := self._answers[ref][1], Exception):
            raise answer
        return answer


def raised(error: Exception) -> Exception:
    return RayTaskError("step", "traceback", error).as_instanceof_cause()


PEER = raised(RuntimeError("Connection closed by peer"))
NEVER = (1e9, None)
SEND = "sending weights to the engines"


@pytest.mark.parametrize(
    ("answers", "kind", "message", "after_s"),
    [
        ([(1, PEER), (71, ActorDiedError())], WorkerLost, "rank 1 died during a step", 71),
        ([(1, ActorDiedError()), NEVER], WorkerLost, "rank 0 died", 1),
        ([(1, PEER), NEVER], CollectiveTimeout, "rank 0 failed during a step: Connection cl", 91),
        ([(1, raised(KeyError("own"))), NEVER], CollectiveTimeout, "rank 0 failed .*own", 6),
        ([(1, raised(KeyError("own"))), (2, "well")], RuntimeError, "rank 0 failed .*own", 2),
        ([(1, ObjectLostError("ref", "", "")), NEVER], WorkerLost, "rank 0 failed", 1),
        ([(1, "well"), NEVER], WorkerLost, "waited 100 s for a step: .* trainer rank 1", 100),
    ],
)
def test_failures_name_the_lost_rank(
    answers: list[tuple[float, Any]],
    kind: type[Exception],
    message: str,
    after_s: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, *answers)
    with pytest.raises(RuntimeError, match=message) as info:
        ranks.ask(ranks.learner(make_config(2, 1)), 100.0)
    assert type(info.value) is kind and ranks.now == after_s


def test_lost_sender_fails_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (1, PEER), (71, ActorDiedError()))
    engines = dict.fromkeys(range(3))
    for future in ranks.learner(make_config(2, 1), direct=True).send_weights(engines).values():
        error = future.exception(PATIENCE_S)
        assert isinstance(error, WorkerLost) and f"rank 1 died during {SEND}" in str(error)
    ranks = Ranks(monkeypatch, (1, {0: 5, 2: EngineError("is gone")}), (2, {1: 5}))
    zero, one, two = ranks.learner(make_config(2, 1), direct=True).send_weights(engines).values()
    assert zero.result(PATIENCE_S) == one.result(PATIENCE_S) == 5
    assert isinstance(two.exception(PATIENCE_S), EngineError)


def test_failed_preparation_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (1, raised(RuntimeError("DeepSpeed 1 is installed"))), (2, None))
    learner = ranks.learner(make_config(2, 1))
    learner._prepared = [0, 1]
    with pytest.raises(RuntimeError, match=r"rank 0 .* libraries and model: DeepSpeed 1 is"):
        learner.wait_until_prepared()


def test_host_memory_is_not_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, kind in (
        (OutOfMemoryError("Ray killed the process"), WorkerLost),
        (raised(torch.OutOfMemoryError("CUDA out of memory")), OutOfMemory),
    ):
        ranks = Ranks(monkeypatch, (1, error), (2, "well"))
        with pytest.raises(kind):
            ranks.ask(ranks.learner(make_config(2, 1)), 100.0, STEP)


def test_deadline_scales_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = Ranks(monkeypatch, (1, StepReport(version=3, metrics={}))).learner(make_config(1, 1))
    monkeypatch.setattr(ray_timeouts, "put", lambda value: value)
    segments = (supervised_segment("s", [*range(5)], [False] + [True] * 4),)
    examples = [SftExample(prompt_id="c", segments=segments)]
    (plan,) = plan_sft(examples, replicas=1, micro_batch_tokens=5)
    waited, wait = list[float](), learner._ranks.wait

    def noted(refs: Sequence[Any], limit: CallDeadline) -> list[Any]:
        if limit.what == "packing":
            return [set()]
        waited.append(limit.seconds)
        return wait(refs, limit)

    monkeypatch.setattr(learner._ranks, "wait", noted)
    for steps in (1, 4):
        learner._ranks._longest_s = {}
        assert learner.step_on([[plan] * steps], examples).version == 3
    assert waited == [60, 240]


def test_ranks_score_the_plan_of_their_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [(1, {"s/nll": Mean(total, 1)}) for total in (1.0, 1.0, 3.0, 3.0)]
    ranks = Ranks(monkeypatch, *answers)
    learner = ranks.learner(make_config(4, 1, sequence_parallel=2))
    monkeypatch.setattr(ray_timeouts, "put", lambda value: value)
    segments = [supervised_segment("s", [n] * 5, [False] + [True] * 4) for n in range(4)]
    examples = [SftExample(prompt_id=f"c{n}", segments=(one,)) for n, one in enumerate(segments)]
    plans = plan_sft(examples, replicas=2, micro_batch_tokens=5)
    whole = [[m.token_ids_N[0] for m in plan.pack().micro_batches] for plan in plans]
    assert [len(ids) for ids in whole] == [2, 2]
    assert values(learner.evaluate_nll([{"s": plan} for plan in plans])) == {"s/nll": 2.0}
    received: list[list[int]] = [[] for _ in range(4)]
    for rank, own in ranks.calls:
        (micro,) = own["s"].pack().micro_batches
        received[rank].append(micro.token_ids_N[0])
    assert received == [whole[0], whole[0], whole[1], whole[1]]
    assert learner.evaluate_nll([{"s": plan} for plan in plans], lambda: True) == {}


def mask_passes(config: Config) -> list[list[int]]:
    """Forward-only passes of each group of ranks, per update."""
    pair = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    groups = [scored(pair, [0.0, 1.0]), scored(pair, [1.0, 1.0], kl_coef=0.1)]

    def passes(batch: TrainBatch) -> int:
        assert batch.split_sequences in (0, 2)
        return len(batch.mask_pass)

    return [[passes(plan.pack()) for plan in plans] for plans in plan_batches(groups, config)]


def test_split_trajectories_need_a_mask_pass() -> None:
    config = make_config(4, 1, tokens=10, sequence_parallel=2)
    config = replace(config, algorithm=replace(config.algorithm, updates_per_batch=2))
    assert mask_passes(config) == [[1, 0], [1, 0]]
    without = replace(config, algorithm=replace(config.algorithm, mask_delta=None))
    assert mask_passes(without) == [[0, 0], [0, 0]]


def test_failed_start_is_a_worker_loss() -> None:
    watch: Any = SimpleNamespace(should_stop_waiting=lambda: False)
    for error in (EngineError("its node has died"), TimeoutError("waited 600 s for engine 0")):
        with pytest.raises(WorkerLost, match=str(error)):
            system._await_engines(failed(error), watch)


def test_only_recorded_selections_on_a_gpu_fix_the_cache() -> None:
    sparse = replace(MOE, index_top_k=64, index_width=128)
    config = recipe(keep_selection=True)

    def fixed(gpu: bool, facts: ModelFacts) -> int:
        hardware = machine(1, 80.0) if gpu else Hardware(gpu=False)
        task: Any = SimpleNamespace(config=config, facts=facts, gpu=gpu, hardware=hardware)
        return system._fixed_cache_bytes(task, together=False)

    assert fixed(True, sparse) > 0
    assert fixed(True, MOE) == 0
    assert fixed(False, sparse) == 0, "the engine rejects it with a clear error"


def test_endpoint_conversations_end_with_their_last_group() -> None:
    groups: list[Future[Any]] = [Future(), Future(), Future()]
    remaining, forgotten = iter(groups), []

    class Agents:
        def submit(self, *_: Any, **__: Any) -> Future[Any]:
            return next(remaining)

    class Turns:
        def forget(self, prompt: Any) -> None:
            forgotten.append(prompt.prompt_id)

    parts: dict[str, Any] = {"agents": Agents(), "turns": Turns()}
    unused: Any = None
    remote = system.RemoteRuntime(config=unused, completions=unused, scorer=unused, **parts)
    one, other = (SimpleNamespace(prompt_id=name, environment="shop") for name in ("a", "b"))
    for group in (one, one, other):
        remote.submit(cast(Any, group), "eval", 8)
    groups[0].set_result(None)
    assert not forgotten, "the second group has turns to come"
    groups[2].set_result(None)
    groups[1].set_result(None)
    assert forgotten == ["b", "a"]


class Layer(nn.Module):
    """Scales the output, and inversely the gradient, by 0 or infinity in some rows."""

    def __init__(self, forward: Tensor, backward: Tensor) -> None:
        super().__init__()
        self.factors = forward, backward

    def forward(self, hidden: Tensor) -> tuple[Tensor]:
        forward, backward = self.factors
        inside = hidden * 1
        inside.register_hook(lambda gradient: gradient * backward[:, None])
        return (inside * forward[:, None],)


GROUPS = [scored([trajectory(segment(20 * s, 6), sibling=s) for s in (0, 1)], [0.0, 1.0])]
(BATCH,) = (m for b in pack(GROUPS, replicas=1, micro_batch_tokens=99) for m in b.micro_batches)
TOKENS = len(BATCH.token_ids_N)
SAMPLED = np.flatnonzero(BATCH.trainable_N)


def looked(*, offset: float = 0.0, **changes: tuple[int, float]) -> list[tuple[int, str, bool]]:
    """Findings by row for a network of two layers whose second layer is modified. `forward`,
    `backward`, `slope` and `logp` replace one factor; rows of the last two are sampled tokens."""

    def ones(name: str, count: int = TOKENS) -> Tensor:
        values = torch.ones(count)
        if name in changes:
            values[changes[name][0]] = changes[name][1]
        return values

    layers = [Layer(ones(""), ones("")), Layer(ones("forward"), ones("backward"))]
    look = NanTracer(layers)
    with look.trace(BATCH, 0):
        hidden = torch.ones(1, TOKENS, 2, requires_grad=True)
        for layer in layers:
            (hidden,) = layer(hidden)
        logp_R = -hidden[0, SAMPLED].sum(1) * ones("logp", len(SAMPLED))
        loss = (logp_R * ones("slope", len(SAMPLED))).sum() + offset
        look.observe(logp_R, None, torch.zeros(len(SAMPLED)), loss)
        loss.backward()
    starts = {  # the first row of each segment, by its token ids
        BATCH.token_ids_N[BATCH.segment_N == n].tobytes(): int(np.argmax(BATCH.segment_N == n))
        for n in set(BATCH.segment_N)
    }
    return [(starts[f.token_ids_T.tobytes()] + f.token, f.what, f.certain) for f in look.findings]


def test_first_bad_number_names_token_and_cause() -> None:
    row = int(SAMPLED[2])
    certain = [
        (looked(forward=(9, math.inf)), 9, "not finite from the output of layer 1 on"),
        (looked(logp=(2, math.nan)), row, "log-probability is nan"),
        (looked(slope=(2, math.inf)), row, "slope of the loss is inf"),
        (looked(backward=(row, math.nan)), row, "its gradient is not finite behind layer 0"),
    ]
    for findings, expected, what in certain:
        assert findings[0] == (expected, what, True)


def test_certain_findings_replace_the_steepest() -> None:
    ((row, what, certain),) = looked(slope=(3, 1e30))
    assert row == SAMPLED[3] and "slope of 1e+30" in what and not certain
    ((_, what, certain),) = looked(offset=math.inf)
    assert "the loss of its micro-batch is inf" in what and certain
    looks = [NanTracer([]), NanTracer([])]
    for look, factor in zip(looks, (1.0, math.nan), strict=True):
        with look.trace(BATCH, 0):
            logp = torch.ones(len(SAMPLED), requires_grad=True)
            look.observe(logp, None, torch.zeros(len(SAMPLED)), logp.sum())
            (logp.sum() * factor).backward()
    vague, sure = (look.findings for look in looks)
    assert describe_findings([*vague, *sure], GROUPS) == describe_findings(sure, GROUPS)
    assert describe_findings(vague, GROUPS)[0].startswith("p, completion 1, token ")


def test_skips_in_a_row_end_the_run() -> None:
    skips = SkipCounter(2)
    seen = [skips.count(norm, version) for version, norm in enumerate([1, math.nan, 2, math.inf])]
    assert seen == [False, True, False, True] and not skips.gave_up
    assert skips.count(math.nan, 5)
    assert "2 optimizer steps in a row, the last to version 5" in skips.gave_up
    assert "run.max_skipped_steps" in skips.gave_up
