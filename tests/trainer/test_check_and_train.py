"""`keel check` for simulated hardware agrees with `keel train` on it."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from keel.commands.cli import main
from keel.data.dataset import Dataset
from keel.model.load import ModelFacts
from keel.trainer import prepare
from tests.trainer.machines import NOTHING, Accepted, Machine, at
from tests.trainer.placement.shapes import DENSE


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """The single prompt of all recipes here."""
    folder = tmp_path_factory.mktemp("data")
    recipe(folder)
    task = prepare.prepare(str(folder / "recipe.yaml"), ["run.device=cpu"])
    return task.dataset


def recipe(folder: Path) -> Path:
    (folder / "sums.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    path = folder / "recipe.yaml"
    path.write_text(
        f"run: {{dir: {folder / 'run'}}}\n"
        "model: {tiny: {cold_start: {steps: 0}}}\n"
        f"data: {{sources: [{{name: sums, source: jsonl, path: {folder / 'sums.jsonl'}}}]}}\n"
    )
    return path


@contextlib.contextmanager
def on(machine: Machine, dataset: Dataset, facts: ModelFacts) -> Iterator[None]:
    """Run on this machine with this data and a model of this shape."""
    with at(machine) as patch:
        patch.setattr("keel.trainer.prepare.load_dataset", lambda *_, **__: dataset)
        patch.setattr("keel.trainer.prepare.facts_of", lambda config: facts)
        yield


def verdict(command: str, path: Path, overrides: Sequence[str]) -> tuple[str, str]:
    """Return the start of the command's error, if any, and its output."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = main([command, str(path), *overrides])
        except Accepted:
            status = 0
    error = err.getvalue().removeprefix(f"keel {command}: ")
    assert (status == 2) == bool(error), error
    start = error if "override" in error else re.split(r" \(| it is|:", error)[0]
    return start, out.getvalue()


COLOCATED = {
    "rollout.colocated": True,
    "rollout.gpu_memory_utilization": 0.3,
    "rollout.engines": 2,
    "rollout.tensor_parallel": 1,
    "trainer.ranks": 2,
}


@pytest.mark.parametrize("device", ["auto", "gpu"])
@pytest.mark.parametrize(
    ("machine", "layout"),
    [
        (Machine(gpus=1, gib=139.0), {"rollout.gpu_memory_utilization": 0.85}),
        (Machine(gpus=8, gib=80.0), {"trainer.ranks": 4, "trainer.zero_stage": 3}),
        (Machine(gpus=1, nodes=2, gib=16.0), {**COLOCATED, "rollout.time_share": True}),
        (Machine(gpus=2, gib=48.0), COLOCATED),
        (Machine(gpus=2, gib=4.0), {"rollout.gpu_memory_utilization": 0.97}),
    ],
)
def test_check_refuses_what_train_refuses(
    machine: Machine, layout: dict[str, Any], device: str, dataset: Dataset, tmp_path: Path
) -> None:
    path = recipe(tmp_path)
    plain = [f"run.device={device}", *(f"{k}={str(v).lower()}" for k, v in layout.items())]
    hardware = [f"run.gpu_gib={machine.gib}", f"run.gpus_per_node={machine.gpus}"]
    hardware += [f"run.nodes={machine.nodes}"]
    with on(machine, dataset, DENSE):
        trained, _ = verdict("train", path, plain)
        assert verdict("train", path, [*plain, *hardware])[0] == trained
        assert verdict("check", path, plain)[0] == trained
    with on(NOTHING, dataset, DENSE):
        checked, plan = verdict("check", path, [*plain, *hardware])
    assert checked == trained
    if not checked:
        memory = plan[plan.index("\nmemory") : plan.index("\ntime")]
        peaks = re.findall(r"peak ([\d.]+) GiB", memory)  # time sharing: parts are not held at once
        shown = [float(number) for number in peaks or re.findall(r"([\d.]+) GiB", memory)]
        assert shown and max(shown) <= machine.gib, memory


def test_both_verdicts_occur(dataset: Dataset, tmp_path: Path) -> None:
    """The property above is not vacuous."""
    path = recipe(tmp_path)
    with on(Machine(gpus=1, nodes=1, gib=80.0), dataset, DENSE):
        assert verdict("train", path, [])[0] == ""
        for refused in ("trainer.ranks=2", "rollout.gpu_memory_utilization=0.02"):
            assert verdict("train", path, [refused])[0]
