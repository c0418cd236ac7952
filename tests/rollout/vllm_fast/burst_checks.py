"""What comes of several steps at once. Imports vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsLists, ModelRunnerOutput

from keel.rollout.vllm_fast import bursts
from keel.rollout.vllm_fast.bursts import LONGEST_S, MOST, BurstOutput, Drawn, Pace
from keel.rollout.vllm_fast.sampler import StepLogprobs
from keel.rollout.vllm_fast.sampling_mask import StepSets

STEPS, ROWS, WIDTH = 4, 5, 6


class Late(AsyncModelRunnerOutput):
    """A step's tokens, which come later."""

    def __init__(self, output: ModelRunnerOutput) -> None:
        self._output = output

    def get_output(self) -> ModelRunnerOutput:
        return self._output


def drawn(draw: np.random.Generator, *, room: int, masks: bool) -> tuple[Any, list[list[int]]]:
    """A step as the sampler has it, and its masks."""
    sizes = draw.integers(0, WIDTH + 1, ROWS)
    rows = [np.sort(draw.choice(900, size, replace=False)) for size in sizes]
    ids = torch.full((ROWS, WIDTH), -1, dtype=torch.int32)
    for row, own in enumerate(rows):
        ids[row, : len(own)] = torch.from_numpy(draw.permutation(own))
    flat = torch.full((room,), -1, dtype=torch.int32)
    all_of_them = np.concatenate(rows)[:room]
    flat[: len(all_of_them)] = torch.from_numpy(all_of_them)
    made = SimpleNamespace(
        sampled_token_ids=torch.from_numpy(draw.integers(0, 900, (ROWS, 1))),
        logprobs_tensors=StepLogprobs(torch.from_numpy(draw.random((ROWS, 1), np.float32))),
        sampling_mask_tensors=StepSets(torch.from_numpy(sizes).int(), flat, ids, None)
        if masks
        else None,
    )
    return made, [own.tolist() for own in rows]


def all_tokens_come_with_what_was_recorded_of_them(masks: bool, room: int) -> None:
    """`room`: for ids that travel with their step."""
    for seed in range(20):
        draw = np.random.default_rng(seed)
        steps = [drawn(draw, room=room, masks=masks) for _ in range(STEPS)]
        places = Drawn(STEPS - 1)
        shared, _ = drawn(draw, room=room, masks=masks)  # all steps write to the same places
        for made, _ in steps[:-1]:
            for mine, theirs in zip(of(shared), of(made), strict=True):
                mine.copy_(theirs)
            places.add(shared)
        last = steps[-1][0]
        sets = last.sampling_mask_tensors
        output = ModelRunnerOutput(
            req_ids=list("abcde"),
            req_id_to_index={name: row for row, name in enumerate("abcde")},
            sampled_token_ids=last.sampled_token_ids.tolist(),
            logprobs=last.logprobs_tensors.tolists(),
            sampling_masks=sets and sets.tolists(),
        )
        found = BurstOutput(places.to_host(None, None), Late(output)).get_output()
        for row in range(ROWS):
            tokens = [made.sampled_token_ids[row, 0].item() for made, _ in steps]
            assert found.sampled_token_ids[row] == tokens
            assert isinstance(found.logprobs, LogprobsLists)
            logp = found.logprobs.slice_request(row, STEPS).logprobs[:, 0]
            assert logp.tolist() == [made.logprobs_tensors.logp[row, 0].item() for made, _ in steps]
            if not masks:
                assert found.sampling_masks is None
                continue
            assert found.sampling_masks is not None
            mine = found.sampling_masks.slice_request(row, STEPS)
            assert mine.to_nested_list() == [kept[row] for _, kept in steps]


def of(made: Any) -> list[torch.Tensor]:
    sets = made.sampling_mask_tensors
    more = [] if sets is None else [sets.counts, sets.flat, sets.ids]
    return [made.sampled_token_ids, made.logprobs_tensors.logp, *more]


def a_burst_lasts_no_longer_than_it_may(patch: Any) -> None:
    now = [100.0]
    patch.setattr(bursts, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    pace = Pace()
    assert pace.most(5) == 1, "nobody knows yet"

    def after(seconds: float, steps: int, rows: int = 5) -> int:
        now[0] += seconds
        pace.look()
        now[0] += 7.0  # what is done with them takes no part in it
        pace.came(steps, rows)
        now[0] -= 7.0
        return pace.most(rows)

    assert after(1.0, 1) == 1, "nor now: nothing was before"
    assert after(LONGEST_S / 3.5, 1) == 3
    assert after(LONGEST_S / 3.5, 3) == 3, "one that comes early may follow a late one"
    assert after(LONGEST_S / 3.5, 3) == MOST
    assert pace.most(6) == pace.most(7) == MOST
    assert pace.most(8) == pace.most(2) == 1, "a step of other rows takes another time"
    assert after(5 * LONGEST_S, 1) == 1
    pace.broken()
    assert after(1e-6, 1) == 1, "the time is not that of a step"
    assert after(1e-6, 1) == 1
    assert after(1e-6, 1) == MOST
