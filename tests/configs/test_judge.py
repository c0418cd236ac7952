"""Which judges a recipe may name."""

from __future__ import annotations

from typing import Any

import pytest

from keel.configs.schema import ConfigError, JudgeConfig, JudgeServerConfig

URL = "http://localhost:8000/v1"
SERVED = JudgeConfig(model="m", serve=True, server=JudgeServerConfig(tensor_parallel=2))


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"serve": True}, r"judge\.model = '': goes together with .*serve = True"),
        ({"model": "m"}, r"judge\.model = 'm': goes together with .*serve = False"),
        ({"base_url": URL}, r"judge\.model = '': goes together with"),
        ({"model": "m", "serve": True, "base_url": URL}, r"judge\.base_url = .* remove it"),
        ({"model": "m", "serve": True, "api_key_env": "KEY"}, r"judge\.api_key_env = 'KEY'"),
    ],
)
def test_a_judge_is_an_endpoint_or_a_model_to_serve(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeConfig(**knobs)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"tensor_parallel": 0}, r"judge\.server\.tensor_parallel = 0"),
        ({"gpu_memory_utilization": 1.5}, r"judge\.server\.gpu_memory_utilization = 1\.5"),
        ({"max_model_len": -1}, r"judge\.server\.max_model_len = -1"),
        ({"startup_timeout_s": 0}, r"judge\.server\.startup_timeout_s = 0"),
        ({"options": {"tensor-parallel-size": 2}}, r"options = \['tensor_parallel_size'\]"),
    ],
)
def test_the_servers_knobs_have_ranges(knobs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        JudgeServerConfig(**knobs)


def test_a_judge_is_there_if_and_only_if_it_is_needed() -> None:
    assert (SERVED.gpus, JudgeConfig(base_url=URL, model="m").gpus) == (2, 0)
    SERVED.check_used(judged=True, gpu=True)
    JudgeConfig().check_used(judged=False, gpu=False)
    JudgeConfig(base_url=URL, model="m").check_used(judged=False, gpu=False)
    with pytest.raises(ConfigError, match=r"base_url: empty, .* `refusal`, .*or a model with r"):
        JudgeConfig().check_used(judged=True, gpu=True)
    with pytest.raises(ConfigError, match=r"serve = True: no prompt has criteria"):
        SERVED.check_used(judged=False, gpu=True)
    with pytest.raises(ConfigError, match=r"server\.tensor_parallel = 2: must be 1 on a CPU"):
        SERVED.check_used(judged=True, gpu=False)
