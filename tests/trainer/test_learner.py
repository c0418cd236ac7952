"""The driver's learner without Ray; `test_learner_on_ray.py` has the rest."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, GetTimeoutError, ObjectLostError, RayTaskError

from keel.configs.schema import Config, ConfigError, ModelConfig
from keel.model import ray_timeouts
from keel.model.batch_invariant import VARIABLE
from keel.rl.metrics import Mean, values
from keel.rl.packing import TrainBatch, pack
from keel.rl.sft import SftExample, pack_sft, supervised_segment
from keel.rollout.spec import EngineError
from keel.trainer.learner import STEP, Learner
from keel.trainer.placement.step_deadlines import StepDeadline, StepDeadlines
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.restarts import CollectiveTimeout, OutOfMemory, WorkerLost
from keel.trainer.worker import (
    RankLocation,
    StepReport,
    TrainerWorker,
    pack_shares,
)
from tests.rl.rollouts import scored, segment, trajectory
from tests.trainer.engine.scenarios import make_config
from tests.waiting import PATIENCE_S


class Ranks:
    """Scripted answers of two ranks on a fake clock, without Ray."""

    def __init__(self, patch: pytest.MonkeyPatch, *answers: tuple[float, Any]) -> None:
        """answers: delay in seconds and reply of each rank."""
        self.now, self.fetched_s, self._answers = 0.0, 60.0, dict(enumerate(answers))
        """fetched_s: timeout needed to fetch a result."""
        self._actors = [Rank(number) for number in self._answers]
        patch.setattr(ray_timeouts, "wait", self._wait)
        patch.setattr(ray_timeouts, "get", self._get)
        patience = ray_timeouts.Deadline
        patch.setattr(ray_timeouts, "Deadline", lambda s, *_: patience(s, 1e9, lambda: self.now))

    def learner(self, config: Config, *, direct: bool = False) -> Learner:
        learner = object.__new__(Learner)
        learner._config, learner.direct, learner._ranks = config, direct, self._actors
        learner._order, learner._locations = threading.Lock(), []
        sending_s = config.sending_timeout_s if direct else 0.0
        learner._deadlines = StepDeadlines(config.trainer.timeout_s, sending_s)
        learner._senders = []
        return learner

    def ask(self, learner: Learner, seconds: float) -> list[Any]:
        return learner._call_all(
            "step", deadline=StepDeadline("a step", seconds, "trainer.timeout_s")
        )

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


class Rank:
    def __init__(self, number: int) -> None:
        self.step = self.send = SimpleNamespace(remote=lambda *_: number)


def raised(error: Exception) -> Exception:
    return RayTaskError("step", "traceback", error).as_instanceof_cause()


PEER = raised(RuntimeError("Connection closed by peer"))
NEVER = (1e9, None)
SEND = "sending weights to the engines"


@pytest.mark.parametrize(
    ("answers", "kind", "message", "after_s"),
    [
        ([(1, PEER), (71, ActorDiedError())], WorkerLost, "rank 1 died during a step", 71),
        ([(99, PEER), (130, ActorDiedError())], WorkerLost, "rank 1 died", 130),
        ([(1, ActorDiedError()), NEVER], WorkerLost, "rank 0 died", 1),
        ([(1, PEER), NEVER], CollectiveTimeout, "rank 0 failed during a step: Connection cl", 91),
        ([(1, raised(KeyError("own"))), NEVER], CollectiveTimeout, "rank 0 failed .*own", 6),
        ([(1, raised(KeyError("own"))), (2, "well")], RuntimeError, "rank 0 failed .*own", 2),
        ([(1, ObjectLostError("ref", "", "")), NEVER], WorkerLost, "rank 0 failed", 1),
        ([(1, raised(GetTimeoutError("its own"))), NEVER], CollectiveTimeout, "its own", 91),
        (
            [(1, "well"), NEVER],
            WorkerLost,
            "waited 100 s for a step: no answer from trainer rank 1",
            100,
        ),
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


def test_results_at_the_deadline_count(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, (1, "one"), (100, "other"))
    learner = ranks.learner(make_config(2, 1))
    assert ranks.ask(learner, 100.0) == ["one", "other"]
    ranks.fetched_s = 1e9
    with pytest.raises(WorkerLost, match=r"no answer from trainer rank 0, 1 .trainer.timeout_s"):
        ranks.ask(learner, 100.0)


def test_lost_sender_fails_every_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ranks = Ranks(monkeypatch, (1, PEER), (71, ActorDiedError()))
    engines: Any = [SimpleNamespace(index=index, actor=None) for index in range(3)]
    for future in ranks.learner(make_config(2, 1), direct=True).send(engines):
        error = future.exception(PATIENCE_S)
        assert isinstance(error, WorkerLost) and f"rank 1 died during {SEND}" in str(error)
    ranks = Ranks(monkeypatch, (1, {0: 5, 2: EngineError("is gone")}), (2, {1: 5}))
    zero, one, two = ranks.learner(make_config(2, 1), direct=True).send(engines)
    assert zero.result(PATIENCE_S) == one.result(PATIENCE_S) == 5
    assert isinstance(two.exception(PATIENCE_S), EngineError)


def test_shutdown_ends_sending_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, killed = Ranks(monkeypatch, (1, {0: 1})), threading.Event()
    learner = ranks.learner(make_config(1, 1), direct=True)

    def wait(refs: Sequence[int], *, seconds: float) -> tuple[list[int], list[int]]:
        killed.wait(PATIENCE_S)
        return list(refs), []

    monkeypatch.setattr(ray_timeouts, "wait", wait)
    monkeypatch.setattr(ray_timeouts, "kill", lambda _: killed.set())
    engine: Any = SimpleNamespace(index=0, actor=None)
    (sent,) = learner.send([engine])
    (sender,) = learner._senders
    assert sender.is_alive()
    learner.shutdown()
    assert sent.done() and not sender.is_alive()


def one_batch() -> TrainBatch:
    pair = [trajectory(segment(s, 5), sibling=s) for s in (0, 1)]
    return pack([scored(pair, [0.0, 1.0])], ranks=1, micro_batch_tokens=64)[0]


def test_deadline_scales_with_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(2, 1)
    waited: list[StepDeadline] = []
    learner = Ranks(monkeypatch, (1, StepReport(version=3, metrics={}))).learner(config)
    learner._config = replace(config, trainer=replace(config.trainer, ranks=1))
    learner._warming = []
    monkeypatch.setattr(ray_timeouts, "put", lambda value: value)
    monkeypatch.setattr(ray_timeouts, "call", lambda *_, **__: 0)
    wait = Learner._wait

    def noted(self: Learner, refs: Sequence[Any], limit: StepDeadline) -> list[Any]:
        waited.append(limit)
        return wait(self, refs, limit)

    monkeypatch.setattr(Learner, "_wait", noted)
    for steps in (1, 4):
        learner._deadlines = StepDeadlines(600.0, 0.0)
        assert learner.train([[one_batch()] * steps]).version == 3
    assert [limit.seconds for limit in waited] == [600, 2400]


def test_oom_step_does_not_count_as_timing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(1, 1)
    short = StepReport(version=0, metrics={}, out_of_memory="CUDA out of memory")
    learner = Ranks(monkeypatch, (1, short)).learner(config)
    learner._warming = []
    monkeypatch.setattr(ray_timeouts, "put", lambda value: value)
    monkeypatch.setattr(ray_timeouts, "call", lambda *_, **__: 0)
    before = learner._deadlines.likely(STEP, 1)
    with pytest.raises(OutOfMemory, match="did not fit"):
        learner.train([[one_batch()]])
    assert learner._deadlines.likely(STEP, 1) == before


def test_ranks_must_see_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    config = make_config(2, 1)
    config = replace(config, run=replace(config.run, dir="runs/mine"))
    learner = Ranks(monkeypatch, (0, None), (0, None)).learner(config)
    learner._locations = [RankLocation(host=name, pid=1, log="") for name in ("here", "there")]
    paths: list[Path] = []

    def seen(content: str | None) -> None:
        def all_(_: Learner, method: str, path: str, *, deadline: StepDeadline) -> list[str]:
            paths.append(Path(path))
            read = TrainerWorker.read_text(object.__new__(TrainerWorker), path)
            return [read, read if content is None else content]

        monkeypatch.setattr(Learner, "_call_all", all_)
        learner._check_folder(StepDeadline("the start", 1.0, ""))

    seen(None)
    assert not paths, "nothing of a run is there"
    with RunFolder(config) as folder:
        seen(None)
        assert paths[0].is_absolute() and paths[0].parent == folder.path.absolute()
        for other in ("", "another folder's\n"):
            with pytest.raises(ConfigError, match=r"runs/mine: trainer rank 1 on there does not"):
                seen(other)
        content_before = paths[0].read_text()
    with RunFolder(config):
        assert paths[0].read_text() == content_before, (
            "what other machines remember of it stays right"
        )


def scored_first(config: Config) -> list[list[int]]:
    """Forward-only passes of each group of ranks, per update."""
    pair = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    groups = [scored(pair, [0.0, 1.0]), scored(pair, [1.0, 1.0], kl_coef=0.1)]

    def passes(batch: TrainBatch) -> int:
        assert batch.split_sequences in (0, 2)
        return len(batch.scored_first)

    return [[passes(batch) for batch in share] for share in pack_shares(groups, config)]


def test_split_trajectories_are_scored_first() -> None:
    """With two updates on two groups, the mask cannot drop anything in the second."""
    config = make_config(4, 1, tokens=10, sequence_parallel=2)
    config = replace(config, algorithm=replace(config.algorithm, updates_per_batch=2))
    assert scored_first(config) == [[1, 0], [1, 0]]
    without = replace(config, algorithm=replace(config.algorithm, mask_delta=None))
    assert scored_first(without) == [[0, 0], [0, 0]]


def test_scoring_waits_per_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt: list[list[tuple[str, int]]] = []

    def deal(
        _: Learner, method: str, pieces: Sequence[Mapping[str, TrainBatch]], what: str
    ) -> list[dict[str, Mean]]:
        """Counts as one wait. The loss of a token is its index in the set."""
        assert method == "score"
        dealt.append([(name, len(b.micro_batches)) for p in pieces for name, b in p.items()])
        return [
            {
                f"{name}/nll": Mean(float(row.token_ids_N.sum()), int(row.sequence_tokens_S.sum()))
                for name, batch in piece.items()
                for row in batch.micro_batches
            }
            for piece in pieces
        ]

    monkeypatch.setattr(Learner, "_call_with_shares", deal)
    mask = [False, *[True] * 3]
    sets = {
        name: [
            SftExample(prompt_id=f"{n}", segments=(supervised_segment("c", [0, n, n, n], mask),))
            for n in of
        ]
        for name, of in {"few": range(1, 3), "many": range(1, 9)}.items()
    }
    packed = {name: pack_sft(of, ranks=2, micro_batch_tokens=8) for name, of in sets.items()}
    groups = [{name: batches[rank] for name, batches in packed.items()} for rank in (0, 1)]
    scores = values(Learner.score(object.__new__(Learner), groups))
    assert dealt == [[("few", 1)] * 2, *[[("many", 1)] * 2] * 2]
    assert scores == {"few/nll": 1.5, "many/nll": 4.5}
    dealt.clear()
    assert Learner.score(object.__new__(Learner), groups, lambda: len(dealt) == 2) == {}
    assert len(dealt) == 2


@pytest.mark.parametrize("enabled", [False, True])
def test_ranks_get_batch_invariant_variables(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments: list[Mapping[str, Any]] = []

    def create(kind: type, name: str, options: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        environments.append(options)
        return SimpleNamespace(prepare=None, read=None)

    monkeypatch.setattr(ray_timeouts, "create", create)
    monkeypatch.setattr(ray_timeouts, "call", lambda *_, **__: None)
    config = make_config(ranks=2, stage=1)
    if enabled:
        config = replace(config, model=ModelConfig(path="a/model", batch_invariant=True))
    Learner("a/model", config, gpu=True, actor_options=lambda rank: {"num_gpus": 0.5})
    variables = {VARIABLE: "1"} if enabled else {}
    assert (
        environments
        == [{"num_cpus": 1, "num_gpus": 0.5, "runtime_env": {"env_vars": variables}}]
        * config.trainer.ranks
    )
