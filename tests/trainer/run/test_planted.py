"""No code in a run folder's files runs when the run is resumed, evaluated, reported or replayed."""

import gzip
import io
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from keel.commands.replay import _find_batch, _nearest_checkpoint
from keel.commands.report.page import report
from keel.configs.load import load_config
from keel.data.eval_store import read_evaluation
from keel.data.pass_rates import _PassRate, _read_pass_rates
from keel.model.load import load_model_config, load_policy, load_tokenizer
from keel.model.tiny.build import model_config
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.layouts import load_choice, save_choice, update_choice
from keel.trainer.run.checkpoint import State, config_digest
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.journal import steps_of
from keel.trainer.run.manifest import check_exported
from keel.trainer.run.trackers import _read_state
from keel.trainer.run.trajectory_files import read_batch, save_batch
from tests.commands.report.runs import episode, write_evaluation, write_run

SUFFIXES = {"gzip": ".gz", "numpy": ".npz"}


class Payload:
    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


def payloads(mark: Path) -> Mapping[str, bytes]:
    """For each format, a file that creates the folder `mark` when loaded."""
    payload = Payload(mark)
    saved, zipped = io.BytesIO(), io.BytesIO()
    torch.save({"cpu": payload, "module": payload}, saved)
    array = np.array([payload], object)
    np.savez(zipped, allow_pickle=True, text=array, array_0=array)
    order = f"!!python/object/apply:os.mkdir ['{mark}']\n".encode()
    return {
        "pickle": pickle.dumps(payload),
        "gzip": gzip.compress(pickle.dumps(payload)),
        "torch": saved.getvalue(),
        "numpy": zipped.getvalue(),
        "yaml": order,
    }


def replaced(folder: Path, mark: Path, further: tuple[str, ...] = ()) -> Iterator[str]:
    """Replace each file by each payload in turn, and check that no payload has run."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    for path in [*files, *(folder / name for name in further)]:
        content = path.read_bytes() if path.exists() else None
        for name, payload in payloads(mark).items():
            if name in SUFFIXES and path.suffix != SUFFIXES[name]:
                continue  # only files with this suffix are read in this format
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(payload)
            yield f"{name} in {path}"
            assert not mark.exists(), f"{name} in {path}"
        path.unlink() if content is None else path.write_bytes(content)


def write_whole_run(folder: Path) -> None:
    """Write a run folder that contains a file of every kind."""
    config = load_config("quickstart", [f"run.dir={folder}"])
    with RunFolder(config) as run:
        state = State(step=1, version=1, config=config_digest(config))
        run.save(state, lambda _: {})
    write_run(folder, steps=2)
    write_evaluation(folder / "evaluations" / "one")
    (folder / "filter").mkdir()
    shares: Any = {"samples": 2, "passes": 1, "score": 0.5, "unscored": 0, "dropped": {}}
    rate = _PassRate(id="a", source="s", domain="d", digest="", **shares)
    (folder / "filter" / "rates.jsonl").write_text(json.dumps(rate.line()) + "\n")
    (folder / "trackers").mkdir()
    (folder / "trackers" / "wandb.json").write_text('{"id": "x"}')
    save_choice(folder, {"trainer.ranks": 2}, {"gpu": 1})
    save_batch(folder, 1, [episode()], ["found"])
    tokenizer = build_tokenizer()
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  (takes a second)

    tiny = replace(config.model.tiny, layers=1)
    AutoModelForCausalLM.from_config(model_config(tiny, tokenizer)).save_pretrained(
        folder / "model"
    )
    tokenizer.save_pretrained(folder / "model")


@pytest.mark.e2e
def test_driver_files_run_no_code(tmp_path: Path) -> None:
    run = tmp_path / "run"
    write_whole_run(run)
    config = load_config("quickstart", [f"run.dir={run}"])
    model = str(run / "model")
    readers: list[Callable[[], object]] = [
        lambda: RunFolder(config).check(),
        lambda: RunFolder(config).warnings(),
        lambda: RunFolder(config).select_checkpoint("eval.checkpoint", "1"),
        lambda: check_exported(RunFolder(config).model, ""),
        lambda: load_config(run / "config.yaml"),
        lambda: load_choice(config, {}),
        lambda: update_choice(run, {}),
        lambda: steps_of(run / "metrics.jsonl"),
        lambda: read_batch(_find_batch(run, 1)),
        lambda: _nearest_checkpoint(run / "checkpoints", 2),
        lambda: read_evaluation(run / "evaluations" / "one"),
        lambda: _read_pass_rates(run / "filter" / "rates.jsonl"),
        lambda: _read_state(run / "trackers" / "wandb.json"),
    ]
    of_model: list[Callable[[], object]] = [
        lambda: load_tokenizer(model),
        lambda: load_model_config(model),
        lambda: load_policy(model, torch.float32),
    ]
    for read in [*readers, *of_model]:
        read()
    shown = [str(run / name) for name in ("config", "metrics", "events", "traj", "evaluations")]

    def write_report() -> None:  # slow, and reads only some of the files
        report([str(run), str(run / "evaluations" / "one")], str(tmp_path / "page.html"))

    write_report()
    for place in replaced(run, tmp_path / "mark", ("checkpoints/step_000001/deepspeed/states.pt",)):
        reported = [write_report] * any(name in place for name in shown)
        for read in of_model if model in place else [*readers, *reported]:
            with suppress(Exception):
                read()
