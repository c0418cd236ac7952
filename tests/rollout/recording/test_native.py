"""Tests the native recorder and the selection of the recorder."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from keel.configs.schema import RolloutConfig, SamplingConfig
from keel.rl.recordings import NO_ROUTE
from keel.rollout.recording.base import (
    RecordingOptions,
    check_routed,
    recorder_name,
)
from keel.rollout.recording.native import NativeRecorder, _check_selected
from keel.rollout.spec import WIDEST_MASK, RecordingError

PROMPT = 3
BOTH = RecordingOptions(routes=True, sampling_mask=True)
NEITHER = RecordingOptions(routes=False, sampling_mask=False)


def engine(*, v2: bool = True) -> Any:
    """An engine with four layers. Layers 0 and 2 are mixtures of experts."""
    return SimpleNamespace(
        vllm_config=SimpleNamespace(use_v2_model_runner=v2), collective_rpc=lambda _: [[0, 2]]
    )


def flat(positions: list[list[tuple[int, float]]]) -> Any:
    class Flat(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.start_indices)

    entries = [entry for position in positions for entry in position]
    return Flat(
        start_indices=np.cumsum([0, *map(len, positions)]).tolist()[:-1],
        token_ids=[token for token, _ in entries],
        logprobs=[logp for _, logp in entries],
    )


def output(**changes: Any) -> Any:
    """An output with two tokens after a prompt of three tokens. Layers 1 and 3 are dense."""
    routes = np.zeros((PROMPT + 1, 4, 2), np.uint8)
    routes[:, 0], routes[:, 2] = (1, 2), (200, 0)
    fields: dict[str, Any] = {
        "token_ids": [7, 9],
        "logprobs": flat([[(7, -0.5)], [(9, -1.5), (8, -0.1)]]),
        "sampling_mask": SimpleNamespace(token_ids=[[8, 7], [9]]),  # in the order of the logits
        "routed_experts": routes,
    }
    return SimpleNamespace(**{**fields, **changes})


def recorder(options: RecordingOptions = BOTH) -> NativeRecorder:
    native = NativeRecorder(routes=True, sampling_mask=True)
    native.attach(engine())
    native.expect("r", options)
    return native


def test_outputs_become_recordings() -> None:
    native = recorder()
    logp, arrays = native.take("r", PROMPT, output())
    assert logp.tolist() == [-0.5, -1.5]
    masks, routes = arrays.sampling_mask, arrays.routes_TLK
    assert masks is not None and routes is not None
    assert [masks[t].tolist() for t in range(2)] == [[7, 8], [9]]
    assert routes.dtype == np.int16 and len(routes) == PROMPT + 1
    assert routes[0].tolist() == [[1, 2], [200, 0]]
    assert not native._options


@pytest.mark.parametrize(
    "changes",
    [
        {"logprobs": None},
        {"logprobs": flat([[(7, -1.0)]])},
        {"logprobs": flat([[(7, -1.0)], [(8, -1.0)]])},  # not the completion's tokens
        {"sampling_mask": None},
        {"sampling_mask": SimpleNamespace(token_ids=[[7]])},
        {"sampling_mask": SimpleNamespace(token_ids=[[7], [8]])},  # without the token itself
        {"routed_experts": None},
        {"routed_experts": np.ones((3, 4, 2), np.uint8)},
        {"routed_experts": np.zeros((4, 4, 2), np.uint8)},
    ],
)
def test_a_gap_names_the_request(changes: dict[str, Any]) -> None:
    with pytest.raises(RecordingError, match="request r"):
        recorder().take("r", PROMPT, output(**changes))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_completions_skip_other_checks(value: float) -> None:
    native = recorder()
    changes = {
        "logprobs": flat([[(7, -1.0)], [(9, value)]]),
        "sampling_mask": SimpleNamespace(token_ids=[[7, 8], []]),
        "routed_experts": np.zeros((4, 4, 2)),
    }
    logp, arrays = native.take("r", PROMPT, output(**changes))
    assert np.array_equal(logp, np.array([-1, value], np.float32), equal_nan=True)
    assert arrays.sampling_mask is None and arrays.routes_TLK is None
    assert not native._options


def test_evaluation_records_log_probabilities_only() -> None:
    native = recorder(NEITHER)
    _, arrays = native.take("r", PROMPT, output(sampling_mask=None, routed_experts=None))
    assert arrays.sampling_mask is None and arrays.routes_TLK is None
    args = native.sampling_args(SamplingConfig(), NEITHER)
    assert args["top_k"] == WIDEST_MASK and args["logprobs"] == 0


@pytest.mark.parametrize(
    ("config", "gpu", "full_attention", "expected"),
    [
        ({}, True, True, "packed"),
        ({}, False, True, "v1"),
        ({"recorder": "native"}, True, True, "native"),
        ({"tensor_parallel": 2}, True, True, "native"),
        ({}, True, False, "native"),
        ({"recorder": "packed"}, False, True, None),
        ({"recorder": "v1"}, True, True, None),
    ],
)
def test_choice_of_the_recorder(
    config: dict[str, Any], gpu: bool, full_attention: bool, expected: str | None
) -> None:
    choose = lambda: recorder_name(  # noqa: E731
        RolloutConfig(**config), gpu=gpu, full_attention=full_attention
    )
    if expected is not None:
        assert choose() == expected
    else:
        with pytest.raises(ValueError, match="recorder"):
            choose()


def test_an_incomplete_selection_is_refused() -> None:
    selected = np.zeros((6, 2, 2), np.uint8)
    selected[2:, :, 0] = 0b111
    _check_selected("r", selected, 1, 3)  # the first two rows attend to their whole contexts
    selected[4, 1, 0] = 0b11
    with pytest.raises(RecordingError, match="request r"):
        _check_selected("r", selected, 1, 3)


def test_a_missing_route_is_refused() -> None:
    routes = np.ones((4, 2, 2), np.int16)
    check_routed("r", routes)
    check_routed("r", routes[:0])
    check_routed("r", np.zeros((4, 2, 1), np.int16))  # a single expert per token may be expert 0
    routes[2, 1] = NO_ROUTE
    with pytest.raises(RecordingError, match="request r"):
        check_routed("r", routes)


def test_rows_from_before_a_preemption_are_kept() -> None:
    native = recorder()
    native._saved["r"] = np.full((2, 1, 1), 7, np.uint8)  # of a shorter context: one byte
    asked: list[int] = []

    def read_after(count: int) -> np.ndarray:
        asked.append(count)
        return np.full((5 - count, 1, 2), 9, np.uint8)

    rows = native._rows("r", 5, read_after)
    assert asked == [2]
    assert rows[:, 0].tolist() == [[7, 0], [7, 0], [9, 9], [9, 9], [9, 9]]
    native._saved["r"] = rows
    assert native._rows("r", 4, read_after).tolist() == rows[:4].tolist() and asked == [2]
