"""What the native recorder makes of vLLM's outputs, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.types import NO_ROUTE
from keel.rollout.recording.base import Wanted, check_routed, recorder_name
from keel.rollout.recording.native import WIDEST_MASK, NativeRecorder
from keel.rollout.spec import RecordingError

PROMPT = 3
BOTH = Wanted(routes=True, sampling_mask=True)


class FakeEngine:
    """Four layers, of which 0 and 2 are mixtures of experts."""

    vllm_config = SimpleNamespace(use_v2_model_runner=True)

    def collective_rpc(self, method: str) -> list[list[int]]:
        assert method == "keel_moe_layers"
        return [[0, 2]]


def output(**changes: Any) -> Any:
    """Two tokens after a prompt of three; layers 1 and 3 are dense."""
    routes = np.zeros((PROMPT + 1, 4, 2), np.uint8)
    routes[:, 0], routes[:, 2] = (1, 2), (200, 0)
    fields: dict[str, Any] = {
        "token_ids": [7, 9],
        "logprobs": flat([[(7, -0.5)], [(9, -1.5), (8, -0.1)]]),
        "sampling_mask": SimpleNamespace(token_ids=[[8, 7], [9]]),  # in the order of the logits
        "routed_experts": routes,
    }
    return SimpleNamespace(**{**fields, **changes})


def flat(positions: list[list[tuple[int, float]]]) -> Any:
    starts = np.cumsum([0, *(len(position) for position in positions)]).tolist()

    class Flat(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.start_indices)

    entries = [entry for position in positions for entry in position]
    return Flat(
        start_indices=starts[:-1],
        token_ids=[token for token, _ in entries],
        logprobs=[logp for _, logp in entries],
    )


def recorder() -> NativeRecorder:
    built = NativeRecorder(routes=True, sampling_mask=True)
    built.attach(FakeEngine())  # type: ignore[arg-type]
    built.expect("r", BOTH)
    return built


def test_outputs_become_recordings() -> None:
    native = recorder()
    recording = native.take("r", PROMPT, output())
    assert recording.logp.tolist() == [-0.5, -1.5]
    assert recording.sampling_mask is not None and recording.routes is not None
    assert [recording.sampling_mask[t].tolist() for t in range(2)] == [[7, 8], [9]]
    assert recording.routes.dtype == np.int16
    assert recording.routes[0].tolist() == [[1, 2], [200, 0]]
    assert native.pending() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": None}, "returned no logprobs"),
        ({"logprobs": flat([[(7, -1.0)]])}, "recorded 1 logprobs where 2 are due"),
        ({"logprobs": flat([[(7, -1.0)], [(8, -1.0)]])}, "not those of the completion's tokens"),
        ({"sampling_mask": None}, "returned no sampling mask"),
        ({"sampling_mask": SimpleNamespace(token_ids=[[7]])}, "recorded 1 sampling masks"),
        ({"sampling_mask": SimpleNamespace(token_ids=[[7], [8]])}, "token 1 of the completion"),
        ({"sampling_mask": SimpleNamespace(token_ids=[[], [9]])}, "token 0 of the completion"),
        ({"routed_experts": None}, "returned no routes"),
        ({"routed_experts": np.ones((3, 4, 2), np.uint8)}, "recorded 3 rows of routes where 4"),
        ({"routed_experts": np.zeros((4, 4, 2), np.uint8)}, r"MoE layers \[0, 1\].* all zeros"),
    ],
)
def test_a_gap_names_the_request(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RecordingError, match=f"request r: .*{message}"):
        recorder().take("r", PROMPT, output(**changes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_of_a_completion_that_is_not_finite_nothing_else_is_looked_at(value: float) -> None:
    """It is dropped. vLLM's masks leave out ids whose logits are no numbers, so that none is kept
    where all are."""
    native = recorder()
    masks = SimpleNamespace(token_ids=[[7, 8], []])
    logprobs = flat([[(7, -1.0)], [(9, value)]])
    given = output(logprobs=logprobs, sampling_mask=masks, routed_experts=np.zeros((4, 4, 2)))
    recording = native.take("r", PROMPT, given)
    assert np.array_equal(recording.logp, np.array([-1, value], np.float32), equal_nan=True)
    assert recording.sampling_mask is None and recording.routes is None
    assert native.pending() == 0


def test_evaluation_needs_neither_masks_nor_routes() -> None:
    native = NativeRecorder(routes=True, sampling_mask=True)
    native.expect("r", Wanted(routes=False, sampling_mask=False))
    recording = native.take("r", PROMPT, output(sampling_mask=None, routed_experts=None))
    assert recording.sampling_mask is None and recording.routes is None


def test_open_sampling_on_an_engine_with_masks() -> None:
    native = recorder()
    unrecorded = native.sampling_args(SamplingConfig(), Wanted(routes=False, sampling_mask=False))
    assert unrecorded["top_k"] == WIDEST_MASK and unrecorded["logprobs"] == 0
    with pytest.raises(ValueError, match="top_k"):
        native.sampling_args(SamplingConfig(), Wanted(routes=True, sampling_mask=False))


def test_the_v1_runner_is_refused() -> None:
    engine = FakeEngine()
    engine.vllm_config = SimpleNamespace(use_v2_model_runner=False)
    with pytest.raises(ValueError, match="needs Model Runner V2"):
        NativeRecorder(routes=True, sampling_mask=True).attach(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "gpu", "expected"),
    [
        ("auto", True, "packed"),
        ("auto", False, "v1"),
        ("native", True, "native"),
        ("packed", True, "packed"),
    ],
)
def test_choice_of_the_recorder(name: Any, gpu: bool, expected: str) -> None:
    assert recorder_name(RolloutConfig(recorder=name), gpu=gpu) == expected


def test_packed_is_for_one_gpu_and_full_attention() -> None:
    spread = RolloutConfig(tensor_parallel=2)
    assert recorder_name(spread, gpu=True) == "native"
    assert recorder_name(RolloutConfig(), gpu=True, full_attention=False) == "native"
    assert recorder_name(spread, gpu=False, full_attention=False) == "v1"


@pytest.mark.parametrize(("name", "gpu"), [("native", False), ("packed", False), ("v1", True)])
def test_a_recorder_that_cannot_work_here(name: Any, gpu: bool) -> None:
    with pytest.raises(ValueError, match=f"rollout.recorder = '{name}'"):
        recorder_name(RolloutConfig(recorder=name), gpu=gpu)


def test_a_token_without_a_route_is_named() -> None:
    routes = np.ones((4, 2, 2), np.int16)
    check_routed("r", routes)
    routes[2, 1] = NO_ROUTE
    with pytest.raises(RecordingError, match="request r: 1 of its 4 tokens have no route, token 2"):
        check_routed("r", routes)
