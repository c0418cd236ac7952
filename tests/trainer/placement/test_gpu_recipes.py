"""GPU recipes pass `keel check` on a machine without GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.common import QWEN3_06B
from keel.configs.load import load_config
from keel.configs.schema import ConfigError
from keel.model.tiny.tokenizer import build_tokenizer
from keel.trainer.placement.hardware import idle_nodes, place
from keel.trainer.placement.nodes import planned_hardware, seat_lines
from keel.trainer.prepare import prepare

SHARED = "engine 0 on GPU 0, shared; trainer rank 0 on GPU 0, shared"
SEATS = {
    "tiny-100m": (1, SHARED),
    "gpu-dense": (1, SHARED),
    "gpu2-async": (2, "engine 0 on GPU 1; trainer rank 0 on GPU 0"),
    "gpu4-expert-parallel": (4, "engines 0–1 on GPUs 2–3; trainer ranks 0–1 on GPUs 0–1"),
}


@pytest.mark.parametrize("name", SEATS)
def test_recipe_fits_the_gpus_in_its_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpus, seats = SEATS[name]
    config = load_config(name)
    if gpus > 2:  # a single GPU can be shared
        with pytest.raises(ConfigError):
            place(config, idle_nodes(1, gpus - 1))
    overrides = ["run.gpu_gib=80", f"run.gpus_per_node={gpus}"]
    for number in range(len(config.data.sources)):
        overrides += [f"data.sources.{number}.{few}" for few in ("size=32", "holdout=8")]
    if name == "gpu-dense":
        build_tokenizer().save_pretrained(tmp_path)
        QWEN3_06B.save_pretrained(tmp_path)
        overrides += [f"model.path={tmp_path}", "data.max_prompt_tokens=1024"]
    task = prepare(name, overrides, hardware=planned_hardware)
    assert seat_lines(task.config, task.hardware) == [f"node 0: {seats}"]
    text = task.text()
    assert "KV cache holds all" in text and "OFF" not in text
