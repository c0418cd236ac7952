"""`keel eval`: score a policy without training it."""

import math
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from keel.agents.episode import BROKE
from keel.configs.load import load_config
from keel.configs.schema import BUSY_S, Config, ConfigError, EvalVariant
from keel.data.dataset import Dataset, source_lines
from keel.data.eval_store import EvaluationFolder, collect_samples
from keel.data.results import format_results, results
from keel.rewards.judge.service import JudgeService
from keel.rewards.text import every_turn, final_text, marked_answer, thinking_text
from keel.rl.futures import then
from keel.rl.types import Prompt, ScoredGroup, Trajectory
from keel.rollout.endpoint import LATER, EndpointCompletions
from keel.trainer.launch import (
    RemoteRuntime,
    Runtime,
    build_scorer,
    launch,
    run_episodes,
    run_remote_episodes,
)
from keel.trainer.prepare import (
    check_rewards,
    check_sources,
    load_prompts,
    needs_judge,
    prepare,
)
from keel.trainer.run.folder import RunFolder
from keel.trainer.run.manifest import fingerprint
from keel.trainer.run.progress import format_amount, waiting
from keel.trainer.run.signals import Interrupt

_POLICY_KNOBS = ("model.", "trainer.")
"""Knobs that must match the run for its checkpoint to load."""
_REWARDS_FOLDER = "rewards"
"""Subfolder of the results for the output of reward functions."""
_POLL_S = 1.0
_STOPPING = "Stopping; finished prompts are saved. Press Ctrl-C again to stop at once."
_PREEMPTED = "{signal}: stopping; finished prompts are saved"
_MAX_ANSWER = 200
"""Maximum length in characters of an unmarked answer that is compared with other answers."""


_Runtime = Runtime | RemoteRuntime


@dataclass(frozen=True, kw_only=True)
class _SampledPolicy:
    """The policy to sample from, along with its prompts."""

    config: Config
    dataset: Dataset
    identity: str
    """Identifies the policy in saved results, so that results of different policies are not
    mixed."""
    label: str
    """Name of the sampled model, shown to the user."""
    name: str
    """Name of the results folder."""
    text: str
    """Description of what will be sampled, to show to the user."""
    sampling: Callable[[Path], AbstractContextManager[_Runtime]]
    """Start the processes that sample and score. Reward functions write their output to a subfolder
    of the given folder."""
    tokenizer_digest: str = ""
    """Digest of the tokenizer, or empty for an endpoint."""
    count_tokens: Callable[[Prompt], int] | None = None
    """Count the tokens of a prompt. None for an endpoint."""
    thinking_length: Callable[[Trajectory], int] = lambda trajectory: len(_all_thinking(trajectory))
    """Return the length of a completion's thinking in tokens, or in characters for an endpoint."""

    @property
    def sets(self) -> Mapping[str, Sequence[Prompt]]:
        settings, dataset = self.config.eval, self.dataset
        heldout = settings.prompts == "heldout"
        sets = dataset.heldout if heldout else dataset.train.sources
        return {name: prompts[: settings.size or None] for name, prompts in sets.items()}

    @contextmanager
    def running(self, out: Path) -> Iterator[tuple[_Runtime, Interrupt]]:
        with (
            self.sampling(out) as runtime,
            Interrupt(print, _STOPPING, preempted_first=_PREEMPTED) as stop,
        ):
            yield runtime, stop


def evaluate(recipe: str, overrides: Sequence[str]) -> None:
    """Score a checkpoint, the base model or an endpoint on the held-out or training prompts, once
    for each variant in `eval.variants`."""
    config = load_config(recipe, overrides)
    variants = config.eval.each_variant
    for variant in variants:
        config.check_variant(variant)
    policy = choose_policy(recipe, overrides, "eval.checkpoint", config.eval.checkpoint)
    sets = policy.sets
    if not any(sets.values()):
        raise ConfigError(
            "data.sources: no source has a holdout, so there is nothing to evaluate on. Name a "
            "file of problems: --eval FILE; or set data.sources[].holdout"
        )
    if policy.count_tokens is not None:
        for variant in variants:
            _check_prompts_fit(policy.config, variant, sets, policy.count_tokens)
    with EvaluationFolder(config, policy.identity, policy.name) as out:
        print(f"{policy.text}\nsampling with {policy.label}", flush=True)
        with policy.running(out.path) as (runtime, stop):
            for variant in variants:
                if not stop():
                    _sample_variant(policy, runtime, variant, out, stop)
        ids = {prompt.prompt_id for prompts in sets.values() for prompt in prompts}
        sampled = [one for one in out.asked if one.id in ids]
        if not sampled:
            print(f"nothing was sampled; rerun the same command to resume in {out.path}")
            return
        scores = results(sampled, config.eval.each_pass_at, config.eval.submissions)
        lines = format_results(scores)
        reasons = Counter(reason for one in sampled for reason in one.missing)
        lines += [f"{n:,} completions missing, counted as wrong: {r}" for r, n in reasons.items()]
        if any(out.waiting(v.name, prompts) for v in variants for prompts in sets.values()):
            lines.append("sampling is incomplete; rerun the same command to resume")
        else:
            out.finish(scores)
        print("\n".join([*lines, f"completions and results: {out.path}"]))


def _sample_variant(
    policy: _SampledPolicy,
    runtime: _Runtime,
    variant: EvalVariant,
    out: EvaluationFolder,
    stop: Interrupt,
) -> None:
    sources = {
        prompt.prompt_id: (prompt, source)
        for source, prompts in policy.sets.items()
        for prompt in out.waiting(variant.name, prompts)
    }
    digest = policy.tokenizer_digest

    def record(asked: Prompt, groups: Sequence[ScoredGroup]) -> None:
        prompt, source = sources[asked.prompt_id]
        known = (variant.name, source, prompt, groups, extract_answer, policy.thinking_length)
        out.add(collect_samples(*known, tokenizer=digest))

    config = policy.config
    with _variant_runtime(config, runtime, variant) as changed:
        if len(config.eval.each_variant) > 1:
            print(f"variant {variant.name}", flush=True)
        sample_prompts(
            changed,
            [_as_asked(prompt, variant) for prompt, _ in sources.values()],
            config.eval.samples,
            config,
            record=record,
            note=out.progress,
            stop=stop,
        )


@contextmanager
def _variant_runtime(config: Config, runtime: _Runtime, variant: EvalVariant) -> Iterator[_Runtime]:
    changed = config.in_variant(variant)
    if changed is config:
        yield runtime
    elif isinstance(runtime, RemoteRuntime):
        remote = replace(runtime, config=changed)
        with run_remote_episodes(remote) if changed.with_agents else nullcontext(remote) as remote:
            yield remote
    else:
        task = replace(runtime.task, config=changed)
        with run_episodes(task, runtime.pool) as agents:
            yield replace(runtime, task=task, agents=agents)


def _check_prompts_fit(
    config: Config,
    variant: EvalVariant,
    sets: Mapping[str, Sequence[Prompt]],
    count_tokens: Callable[[Prompt], int],
) -> None:
    """Raise ConfigError for the first prompt that doesn't fit in the context window with the
    variant's extra line and token limit."""
    if not variant.line and variant.thinking == "as-asked":
        return
    room = config.max_context - config.in_variant(variant).rollout.sampling.max_tokens
    for prompts in sets.values():
        for prompt in prompts:
            tokens = count_tokens(_as_asked(prompt, variant))
            if tokens > room:
                raise ConfigError(
                    f"eval.variants[{variant.name}]: prompt {prompt.prompt_id} has {tokens} "
                    f"tokens, and the completion leaves {room}. Raise data.max_prompt_tokens by at "
                    f"least {tokens - room}"
                )


def _as_asked(prompt: Prompt, variant: EvalVariant) -> Prompt:
    thinking = prompt.thinking if variant.thinking == "as-asked" else variant.thinking == "with"
    messages = [dict(message) for message in prompt.messages]
    last = next((m for m in reversed(messages) if m.get("role") == "user"), None)
    if variant.line and last is not None:
        last["content"] = f"{last['content']}\n{variant.line}"
    return replace(prompt, thinking=thinking, messages=tuple(messages))


def choose_policy(
    recipe: str, overrides: Sequence[str], knob: str, checkpoint: str
) -> _SampledPolicy:
    """Return the recipe's endpoint if it has one, or else the model at `checkpoint`. Error messages
    about the checkpoint name the setting `knob`. Raises ConfigError if the policy can't be used."""
    config = load_config(recipe, overrides)
    if config.endpoint.base_url:
        return _endpoint_policy(config)
    # Sampling needs no teacher, which may be gone.
    taught = [source.name for source in config.data.sources if source.teacher]
    task = prepare(recipe, [*overrides, *(f"data.sources[{n}].teacher=''" for n in taught)])
    folder = RunFolder(task.config, task.tokenizer_digest)
    folder.check(_POLICY_KNOBS)
    for line in folder.warnings():
        print(f"warning: {line}")
    path = folder.select_checkpoint(knob, checkpoint)
    if path is None and checkpoint == "last":
        print(f"warning: run.dir = {folder.path}: no checkpoint: sampling from model.path")
    weights = fingerprint(path or Path(task.config.model.path).expanduser())
    suffix = f" (weights {weights})" * bool(weights)
    source = f"{folder.path.resolve()}, {path.name}" if path else ""

    @contextmanager
    def sampling(out: Path) -> Iterator[Runtime]:
        # Ranks load a checkpoint; engines load a model folder themselves.
        with launch(task, out / _REWARDS_FOLDER, learner=path is not None) as runtime:
            if path:
                runtime.learner.load(path)
                runtime.wake()
            yield runtime

    def thinking_length(trajectory: Trajectory) -> int:
        # A policy can sample unpaired surrogates, which the tokenizer refuses.
        text = _all_thinking(trajectory).encode(errors="replace").decode()
        return len(task.tokenizer.encode(text, add_special_tokens=False))

    return _SampledPolicy(
        config=task.config,
        dataset=task.dataset,
        identity=(source or "the base model") + suffix,
        label=(source or f"model.path = {task.config.model.path}") + suffix,
        name=path.name if path else "base",
        text=task.text(trains=False),
        sampling=sampling,
        tokenizer_digest=task.tokenizer_digest,
        count_tokens=task.count_tokens,
        thinking_length=thinking_length,
    )


def _endpoint_policy(config: Config) -> _SampledPolicy:
    endpoint = config.endpoint
    check_sources(config)
    for source in config.data.sources:
        if source.environment.program or source.raw:
            raise ConfigError(
                f"endpoint.base_url = {endpoint.base_url}: takes chats and returns text, which "
                f"data.sources[{source.name}] (program or raw) cannot use. Leave it out "
                "(data.only), or serve the model by model.path"
            )
    dataset = load_prompts(config)
    notes = check_rewards(config, dataset)
    judged = needs_judge(config, dataset)
    if judged and not config.rewards.judge.base_url:
        raise ConfigError(
            "rewards.judge.base_url: nothing is served here with endpoint.base_url; give the "
            "judge of these rubrics an endpoint, too"
        )
    try:
        completions = EndpointCompletions(endpoint)
    except ValueError as error:
        raise ConfigError(str(error)) from error

    @contextmanager
    def sampling(out: Path) -> Iterator[RemoteRuntime]:
        with ExitStack() as stack:
            judge = None
            if judged:
                judge = stack.enter_context(JudgeService(config.rewards.judge))
                judge.check_reachable()
            scorer = stack.enter_context(build_scorer(config, judge, out / _REWARDS_FOLDER))
            stack.enter_context(completions)
            remote = RemoteRuntime(config=config, completions=completions, scorer=scorer)
            if config.with_agents:
                remote = stack.enter_context(run_remote_episodes(remote))
            yield remote

    lines = [*source_lines(config, dataset), *(f"{name}: {note}" for name, note in notes.items())]
    identity = f"{endpoint.model} at {endpoint.base_url}"
    return _SampledPolicy(
        config=config,
        dataset=dataset,
        identity=identity,
        label=identity,
        name=re.sub(r"[^\w+-]+", "-", endpoint.model).strip("-") or "endpoint",
        text="\n".join(lines),
        sampling=sampling,
    )


def _max_prompts_in_flight(config: Config, samples: int) -> int:
    """Return how many prompts to sample concurrently: enough to fill the engines or the endpoint
    twice, and at least 2."""
    remote = bool(config.endpoint.base_url)
    capacity = config.endpoint.max_concurrent if remote else config.rollout.capacity
    if config.with_agents:
        capacity = max(capacity, config.max_episodes())
    return max(2, -(-2 * capacity // samples))


def _group_timeout(config: Config) -> float:
    endpoint = config.endpoint
    if not endpoint.base_url:
        return config.group_timeout_s
    waves = math.ceil(config.algorithm.group_size / endpoint.max_concurrent)
    sampling = waves * endpoint.timeout_s * (1 + endpoint.retries)
    # An episode's turns share rollout.timeout_s.
    rest = config.group_timeout_s if config.with_agents else BUSY_S
    return sampling + config.scoring_timeout_s + rest


def sample_prompts(
    runtime: _Runtime,
    prompts: Sequence[Prompt],
    samples: int,
    config: Config,
    *,
    record: Callable[[Prompt, Sequence[ScoredGroup]], None],
    note: Callable[[], str],
    stop: Callable[[], bool],
) -> None:
    """Sample and score `samples` completions per prompt until all are done or `stop` returns True.

    `record` is called on this thread for each finished prompt. Prompts that lost completions to an
    overloaded endpoint aren't recorded, so they are sampled again when the command is rerun. `note`
    returns text for the progress line. Raises TimeoutError if no group finishes within the sum of
    all timeouts.
    """
    should_stop = runtime.with_watchdog(stop)
    size = config.algorithm.group_size
    sizes = [min(size, samples - begun) for begun in range(0, samples, size)]
    score = partial(runtime.scorer.submit, purpose="eval")
    most, timeout_s = _max_prompts_in_flight(config, samples), _group_timeout(config)
    queue, in_flight = deque(prompts), list[tuple[Prompt, list[Future[ScoredGroup]]]]()
    arrived_at, finished = time.monotonic(), 0
    try:
        with waiting("sampling", total=len(prompts), unit="prompts") as progress:
            while (queue or in_flight) and not should_stop():
                while queue and len(in_flight) < most:
                    prompt = queue.popleft()
                    groups = [then(runtime.submit(prompt, "eval", n), score) for n in sizes]
                    in_flight.append((prompt, groups))
                pending = [group for _, groups in in_flight for group in groups if not group.done()]
                arrived, _ = wait(pending, _POLL_S, FIRST_COMPLETED)
                now = time.monotonic()
                if arrived or not pending:
                    arrived_at = now
                elif now - arrived_at > timeout_s:
                    raise TimeoutError(
                        f"waited {timeout_s:.0f} s for a group of completions, with "
                        f"{len(in_flight)} prompts in flight: the timeouts of rollout or endpoint "
                        "and rewards together"
                    )
                unfinished: list[tuple[Prompt, list[Future[ScoredGroup]]]] = []
                for prompt, groups in in_flight:
                    scored = [group.result() for group in groups if group.done()]
                    if len(scored) < len(groups):
                        unfinished.append((prompt, groups))
                        continue
                    dropped = [reason for group in scored for reason in group.group.dropped]
                    if not any(reason.removeprefix(BROKE).startswith(LATER) for reason in dropped):
                        record(prompt, scored)
                    finished += 1
                in_flight = unfinished
                progress.done, progress.note = finished, note()
        if finished:
            print(
                f"sampled {format_amount(finished, len(prompts), 'prompts')}; {note()}", flush=True
            )
    finally:
        for _, groups in in_flight:
            for group in groups:
                group.cancel()


def extract_answer(trajectory: Trajectory) -> str:
    """Extract the marked answer from a completion. Without a mark, return the final text if it is
    short, and "" otherwise."""
    text = final_text(trajectory.messages).strip()
    answer = marked_answer(text)
    if answer is None:
        answer = text if len(text) <= _MAX_ANSWER else ""
    return " ".join(answer.split())


def _all_thinking(trajectory: Trajectory) -> str:
    return every_turn(thinking_text, trajectory.messages)
