"""Samples prompts k times each and hands over what came of each prompt, as soon as it is whole.

A prompt's completions are sampled in groups as large as in training, so that all engines share in
them and the deadlines of a group hold as they do there.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

from keel.configs.schema import Config
from keel.rl.futures import then, when_all
from keel.rl.types import Group, Prompt, ScoredGroup
from keel.trainer.batch_stream import GRACE_S, decoding_steps
from keel.trainer.run.progress import amount, waiting

POLICY = ("model.", "trainer.")
"""Knobs that a run's checkpoint is loaded with: these must be the run's own."""
LOOK_S = 1.0
"""How often it looks whether to stop."""
STOPPING = "Stopping; the prompts that are done are kept. Press Ctrl-C again to stop at once."
GIVEN_UP = "{signal}: stopping; the prompts that are done are kept"


def ahead_of(config: Config, samples: int) -> int:
    """Prompts under way at once: twice what all engines, or the endpoint, have room for, and at
    least two."""
    room = config.rollout.engines * config.rollout.max_num_seqs
    if config.endpoint.base_url:
        room = config.endpoint.max_concurrent
    if config.with_agents:
        room = max(room, config.agents.max_concurrent_episodes)
    return max(2, -(-2 * room // samples))


def deadline_of(config: Config) -> tuple[float, str]:
    """Longest time without a group, in seconds, and the knobs that it comes from."""
    endpoint = config.endpoint
    if endpoint.base_url:
        waves = math.ceil(config.algorithm.group_size / endpoint.max_concurrent)
        sampling = waves * endpoint.timeout_s * (1 + endpoint.retries)
        if config.with_agents:  # an episode's turns have rollout.timeout_s together
            sampling += config.group_timeout_s
        told = "endpoint.timeout_s, with each of endpoint.retries, and the deadline of rewards"
        return sampling + config.scoring_timeout_s + GRACE_S, told
    told = (
        "rollout.timeout_s, twice in case that an engine is replaced, and the deadlines of its "
        "start, of weights and of rewards"
    )
    return config.group_timeout_s + GRACE_S, told


def sample_prompts(
    prompts: Sequence[Prompt],
    samples: int,
    config: Config,
    *,
    sample: Callable[[Prompt, int], Future[Group]],
    score: Callable[[Group], Future[ScoredGroup]],
    record: Callable[[Prompt, Sequence[ScoredGroup]], None],
    said: Callable[[], str],
    stop: Callable[[], bool],
    say: Callable[[str], None],
    decoded: Callable[[], int] | None = None,
) -> None:
    """Sample `samples` completions of each prompt; return when all are done, or soon after `stop`.

    sample(prompt, n), score: return at once, with deadlines of their own. record: called on this
    thread, once per prompt. said: what a line of progress adds. decoded: decoding steps of all
    engines so far, which show progress before any prompt is done; None: not counted. Raises what
    sampling or scoring raised, and TimeoutError if no group at all arrives for longer than all
    their deadlines together.
    """
    size = config.algorithm.group_size
    sizes = [min(size, samples - begun) for begun in range(0, samples, size)]
    queue, flights = deque(prompts), dict[Future[list[ScoredGroup]], Prompt]()
    open_groups = set[Future[ScoredGroup]]()
    timeout_s, told = deadline_of(config)
    heard, finished = time.monotonic(), 0
    before, most = decoded() if decoded else 0, decoding_steps(config, len(prompts) * samples)
    try:
        with waiting("sampling", total=len(prompts), unit="prompts") as under_way:
            while (queue or flights) and not stop():
                while queue and len(flights) < ahead_of(config, samples):
                    prompt = queue.popleft()
                    groups = [then(sample(prompt, n), score) for n in sizes]
                    open_groups |= set(groups)
                    flights[_all_of(groups)] = prompt
                arrived, _ = wait(open_groups, LOOK_S, FIRST_COMPLETED)
                open_groups -= arrived
                for group in arrived:
                    group.result()  # what one raises ends all, and not with the last of its prompt
                now = time.monotonic()
                if arrived:
                    heard = now
                elif now - heard > timeout_s:
                    raise TimeoutError(
                        f"waited {timeout_s:.0f} s for a group of completions ({told}): "
                        f"{len(flights)} prompts are under way"
                    )
                for whole in [flight for flight in flights if flight.done()]:
                    record(flights.pop(whole), whole.result())
                    finished, under_way.note = finished + 1, said()
                steps = min(decoded() - before, most) if decoded else 0
                under_way.done, under_way.total, under_way.unit = finished, len(prompts), "prompts"
                if steps * len(prompts) > finished * most:
                    under_way.done, under_way.total = steps, most
                    under_way.unit = "decoding steps"
        if finished:
            say(f"sampled {amount(finished, len(prompts), 'prompts')}; {said()}")
    finally:
        for group in open_groups:
            group.cancel()


def _all_of(groups: Sequence[Future[ScoredGroup]]) -> Future[list[ScoredGroup]]:
    return when_all(groups, lambda: [group.result() for group in groups])
