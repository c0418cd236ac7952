"""What of the driver's handle needs no Ray; the rest is in `test_learner_on_ray.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from keel.configs.schema import Config
from keel.model import ray_calls
from keel.rl.metrics import Mean, values
from keel.rl.packing import TrainBatch
from keel.rl.supervised.lessons import Lesson, pack_lessons, shown
from keel.trainer.learner import Learner, Limit, last_lines, shares
from keel.trainer.run.restarts import Lost
from tests.rl.rollouts import scored, segment, trajectory
from tests.trainer.engine.scenarios import make_config


def test_last_lines_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("\n".join(f"line {i}" for i in range(10_000)))
    assert last_lines(str(log), 2) == "last lines of its log:\nline 9998\nline 9999"
    log.write_text("")
    assert last_lines(str(log)) == last_lines("") == last_lines(str(tmp_path / "absent")) == ""


def scored_first(config: Config) -> list[list[int]]:
    """Passes without gradient, of each group of ranks for each update."""
    pair = [trajectory(*(segment(20 * s + 5 * w, 5) for w in range(4)), sibling=s) for s in (0, 1)]
    groups = [scored(pair, [0.0, 1.0]), scored(pair, [1.0, 1.0])]

    def passes(batch: TrainBatch) -> int:
        assert batch.split_sequences in (0, 2)
        return len(batch.scored_first)

    return [[passes(batch) for batch in share] for share in shares(groups, config)]


def test_long_trajectories_are_scored_first_where_there_is_a_sequence_mask() -> None:
    """Of two updates on two groups, the second has nothing that the mask could drop."""
    config = make_config(4, 1, tokens=10, sequence_parallel=2)
    config = replace(config, algorithm=replace(config.algorithm, updates_per_batch=2))
    assert scored_first(config) == [[1, 0], [1, 0]]
    without = replace(config, algorithm=replace(config.algorithm, mask_delta=None))
    assert scored_first(without) == [[0, 0], [0, 0]]


def test_a_held_out_set_of_any_size_has_a_steps_deadline_for_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dealt: list[list[tuple[str, int]]] = []

    def deal(
        _: Learner, method: str, pieces: Sequence[Mapping[str, TrainBatch]], what: str
    ) -> list[dict[str, Mean]]:
        """A wait of its own. A token costs its number in the set."""
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

    monkeypatch.setattr(Learner, "_deal", deal)
    said = [False, *[True] * 3]
    sets = {
        name: [Lesson(prompt_id=f"{n}", segments=(shown("c", [0, n, n, n], said),)) for n in of]
        for name, of in {"few": range(1, 3), "many": range(1, 9)}.items()
    }
    packed = {name: pack_lessons(of, ranks=2, micro_batch_tokens=8) for name, of in sets.items()}
    groups = [{name: batches[rank] for name, batches in packed.items()} for rank in (0, 1)]
    found = values(Learner.score(object.__new__(Learner), groups))
    assert dealt == [[("few", 1)] * 2, *[[("many", 1)] * 2] * 2]
    assert found == {"few/nll": 1.5, "many/nll": 4.5}


def test_a_driver_that_was_stopped_has_not_waited_for_its_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As long as the ranks have work for, say, with all of the job."""
    now, answers = 0.0, [[], ["rank 0"], [], ["rank 1"]]

    def stopped(refs: list[str], timeout: float) -> tuple[list[str], list[str]]:
        nonlocal now
        now += 3600.0
        ready = answers.pop(0) if answers else []
        return ready, [ref for ref in refs if ref not in ready]

    class Patience(ray_calls.Patience):
        def __init__(self, seconds: float) -> None:
            super().__init__(seconds, clock=lambda: now)

    monkeypatch.setattr(ray_calls, "Patience", Patience)
    monkeypatch.setattr(ray_calls, "bounded", lambda call, seconds, what: call())
    monkeypatch.setattr(ray, "wait", stopped)
    monkeypatch.setattr(ray_calls, "get", lambda ref, seconds: f"{ref}'s")
    learner = Learner.__new__(Learner)
    learner._whereabouts = []
    limit = Limit("a step", 20.0, "trainer.deadline_s")
    assert learner._wait(["rank 0", "rank 1"], limit) == ["rank 0's", "rank 1's"]
    with pytest.raises(Lost, match="waited 20 s for a step: no answer from trainer rank 0, 1 "):
        learner._wait(["rank 0", "rank 1"], limit)
