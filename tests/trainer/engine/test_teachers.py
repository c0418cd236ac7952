"""On-policy distillation: the KL term compares each domain with its own teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from keel.configs.schema import Config, ConfigError, DataConfig, SourceConfig
from keel.rl.metrics import values
from keel.rl.packing import pack
from keel.rl.types import ScoredGroup
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import TIGHT, Ranks, make_config, run_all

pytestmark = pytest.mark.e2e


def source(name: str, teacher: str) -> SourceConfig:
    return SourceConfig(
        name=name, source="reasoning_gym", task="chain_sum", size=8, kl_coef=1.0, teacher=teacher
    )


def config_for(teachers: dict[str, str]) -> Config:
    sources = tuple(source(name, teacher) for name, teacher in teachers.items())
    return replace(make_config(1, 0, tokens=TIGHT, lr=1e-2), data=DataConfig(sources=sources))


def in_domain(groups: list[ScoredGroup], domain: str) -> list[ScoredGroup]:
    return [
        replace(g, group=replace(g.group, prompt=replace(g.group.prompt, domain=domain)))
        for g in groups
    ]


def kl_of(ranks: Ranks, teachers: dict[str, str], domains: str) -> float:
    """Return the KL metric of one step on a group of each domain."""
    from keel.trainer.worker import pack_shares  # noqa: PLC0415

    config, groups = config_for(teachers), list[ScoredGroup]()
    for number, domain in enumerate(domains):
        groups += in_domain(Rollouts(number).groups(1, 4, kl_coef=1.0), domain)
    ((batch,),) = pack_shares(groups, config)
    return values(ranks.engine(config, "student").step([batch]))["kl/ref"]


def compared(ranks: Ranks) -> dict[str, float]:
    teachers = {"a": str(ranks.folder / "teacher"), "b": str(ranks.folder / "student"), "c": ""}
    return {
        **{domains: kl_of(ranks, teachers, domains) for domains in ("a", "b", "c", "abc")},
        "alone": kl_of(ranks, {"a": teachers["a"]}, "a"),
    }


SCENARIOS = {1: {"compared": compared}}


@pytest.fixture(scope="module")
def kl(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    folder = tmp_path_factory.mktemp("teachers")
    write_model(folder / "student", "dense")
    write_model(folder / "teacher", "dense", seed=7)
    return run_all(folder, __name__)["compared"]


def test_each_domain_is_compared_with_its_teacher(kl: dict[str, float]) -> None:
    assert kl["a"] == kl["alone"] > 1e-3
    assert kl["b"] == kl["c"] == 0.0, "the student itself, as a teacher and as the initial model"
    assert 0 < kl["abc"] < kl["a"]


def test_teachers_need_a_coefficient_and_agree_per_domain() -> None:
    with pytest.raises(ConfigError, match="kl_coef"):
        replace(source("a", "t"), kl_coef=0.0)
    first, second = source("a", "t"), source("b", "u")
    with pytest.raises(ConfigError, match="teacher"):
        DataConfig(sources=(replace(first, domain="d"), replace(second, domain="d")))
    data = DataConfig(sources=(first, second, source("c", "t")))
    assert data.references == ("", "t", "u") and not data.uses_initial_model


def test_teachers_of_untrained_domains_are_not_loaded() -> None:
    from keel.trainer.worker import pack_shares  # noqa: PLC0415

    config = config_for({"a": "t", "b": "u"})
    sources = tuple(replace(each, holdout=2) for each in config.data.sources)
    config = replace(config, data=replace(config.data, sources=sources, train_on=("b",)))
    assert config.data.references == ("", "u")
    groups = in_domain(Rollouts(0).groups(1, 3, kl_coef=1.0), "b")
    ((batch,),) = pack_shares(groups, config)
    kinds = [micro.reference_S for micro in batch.micro_batches]
    assert all(kind is not None and set(kind) == {1} for kind in kinds)


def test_packing_keeps_references() -> None:
    groups: list[Any] = []
    for number, domain in enumerate(("a", "b")):
        groups += in_domain(Rollouts(number).groups(1, 3), domain)
    options: dict[str, Any] = {"ranks": 1, "micro_batch_tokens": 4096}
    (batch,) = pack(groups, references={"a": 0, "b": 2}, **options)
    (micro,) = batch.micro_batches
    assert micro.reference_S is not None and sorted(micro.reference_S) == [0, 0, 0, 2, 2, 2]
    (plain,) = pack(groups, **options)
    assert plain.micro_batches[0].reference_S is None
