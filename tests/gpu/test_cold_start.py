"""The cold start on a GPU: learns, repeats itself, and leaves nothing there."""

from dataclasses import replace
from pathlib import Path

import torch

from keel.configs.schema import ColdStartConfig, SourceConfig, TinyModelConfig
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from tests.gpu.marks import GPU

pytestmark = GPU
SPELLING = SourceConfig(name="spelling", source="reasoning_gym", task="spell_backward", size=8)


def test_the_gpu_teaches_and_is_free_afterwards(tmp_path: Path) -> None:
    config = TinyModelConfig(cold_start=ColdStartConfig(steps=60, batch_size=32, lr=5e-3))
    losses: list[float] = []
    torch.cuda.init()
    before = torch.cuda.mem_get_info()[0]
    folders = [
        ensure_tiny_model(
            replace(config, cache_dir=str(tmp_path / name)),
            Curriculum(seed=0, sources=[SPELLING]),
            device="cuda",
            progress=lambda _step, loss, _seconds: losses.append(loss),
        )
        for name in ("first", "second")
    ]
    assert len(losses) == 120
    assert losses[59] < 0.6 * losses[0]
    assert torch.cuda.memory_allocated() == 0
    assert before - torch.cuda.mem_get_info()[0] < 2**28
    first, second = ((folder / "model.safetensors").read_bytes() for folder in folders)
    assert first == second
