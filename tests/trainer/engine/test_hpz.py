"""Ranks of two nodes that gather from a copy of the parameters on their own node (hpZ) train like
ranks without one."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from keel.rl.metrics import values
from tests.trainer.engine.batches import Rollouts, write_model
from tests.trainer.engine.scenarios import (
    TIGHT,
    Ranks,
    Result,
    Scenario,
    make_config,
    referenced,
    resumed,
    run_all,
    same,
    same_training,
    training,
)

pytestmark = pytest.mark.e2e
RANKS, OF_A_NODE = 4, 2
HPZ = {"hpz_partition_size": OF_A_NODE}
OTHER: dict[str, Any] = {"activation_checkpointing": True, "offload_optimizer": True}


def gathers(**changes: Any) -> Scenario:
    """Count the gathered elements of an optimizer step, by the number of ranks they come from."""

    def run(ranks: Ranks) -> Result:
        from deepspeed.runtime.zero import partition_parameters as module  # noqa: PLC0415

        config = make_config(RANKS, 3, tokens=TIGHT, **changes)
        engine, counts = ranks.engine(config), Counter[int]()
        gather = module._dist_allgather_fn

        def counted(part: Any, whole: Any, group: Any = None) -> Any:
            counts[dist.get_world_size(group)] += whole.numel()
            return gather(part, whole, group)

        ranks.train(engine, config, range(1))  # DeepSpeed records the order of modules
        batch = ranks.batch(Rollouts(1).groups(6, 3), config)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_dist_allgather_fn", counted)
            engine.step([batch])
        return {"counts": dict(counts), "micro-batches": len(batch.micro_batches)}

    return run


SCENARIOS: dict[int, dict[str, Scenario]] = {
    RANKS: {
        "gathers": gathers(),
        "plain": training(3, tokens=TIGHT),
        "recomputed, offloaded": training(3, tokens=TIGHT, **OTHER),
        "reference": referenced(3),
        "hpZ gathers": gathers(**HPZ),
        "hpZ recomputed, offloaded": training(3, tokens=TIGHT, **OTHER, **HPZ),
        "hpZ reference": referenced(3, **HPZ),
        "hpZ resumed asleep": resumed(3, sleep=True, **HPZ),
    }
}
"""Plain ZeRO-3 comes first, because a process keeps its groups."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("hpz")
    write_model(folder / "untied")
    write_model(folder / "tied", tie_word_embeddings=True)
    return run_all(folder, __name__)


def test_training_is_the_same(results: dict[str, Any]) -> None:
    plain, result = (results[f"{prefix}recomputed, offloaded"] for prefix in ("", "hpZ "))
    same_training(result, plain, atol=0, rel=0, abs=0)
    assert any(not torch.equal(plain["after"][n], old) for n, old in plain["before"].items())


def test_reference_is_the_same(results: dict[str, Any]) -> None:
    for plain, result in zip(
        results["reference"]["metrics"], results["hpZ reference"]["metrics"], strict=True
    ):
        assert values(result) == values(plain)


def test_resume_is_exact(results: dict[str, Any]) -> None:
    result = results["hpZ resumed asleep"]
    same(result["resumed"], result["straight"], atol=0)
    same(result["straight"], results["plain"]["after"], atol=0)


def test_only_the_first_gather_crosses_nodes(results: dict[str, Any]) -> None:
    plain, hpz = results["gathers"], results["hpZ gathers"]
    count = plain["micro-batches"]
    assert count == hpz["micro-batches"] > 2
    once = plain["counts"][RANKS] // count
    assert hpz["counts"] == {RANKS: once, OF_A_NODE: once * (count - 1)}
