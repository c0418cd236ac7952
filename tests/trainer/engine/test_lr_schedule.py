from __future__ import annotations

import pytest

from keel.configs.schema import TrainerConfig
from keel.trainer.engine.lr_schedule import learning_rate


def rates(total: int, **options: object) -> list[float]:
    config = TrainerConfig(lr=1.0, **options)  # type: ignore[arg-type]
    return [learning_rate(step, config, total_steps=total) for step in range(1, total + 3)]


def test_constant() -> None:
    assert rates(3) == [1.0] * 5


def test_warmup_reaches_the_rate_at_its_last_step() -> None:
    assert rates(4, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_ends_at_the_minimum_with_the_last_step_and_stays() -> None:
    assert rates(5, warmup_steps=1, schedule="linear", min_lr=0.2) == pytest.approx(
        [1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2]
    )


def test_cosine_is_halfway_down_in_the_middle() -> None:
    assert rates(4, schedule="cosine", min_lr=0.2)[1:] == pytest.approx(
        [0.6, 0.2 + 0.4 * (1 - 2**-0.5), 0.2, 0.2, 0.2]
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_a_warmup_longer_than_the_run(schedule: str) -> None:
    found = rates(2, warmup_steps=8, schedule=schedule)
    assert found == [0.125, 0.25, 0.375, 0.5]


def test_steps_count_from_one() -> None:
    with pytest.raises(ValueError, match="step = 0"):
        learning_rate(0, TrainerConfig(), total_steps=1)
