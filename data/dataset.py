"""All sources of a recipe: read, deduplicated, and split into training and held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, DataConfig, SourceConfig
from keel.data.episodes import load_episodes
from keel.data.items import Item, Loaded, digest
from keel.data.jsonl import load_jsonl
from keel.data.pass_rates import check_same, read_pass_rates
from keel.data.procedural import load_reasoning_gym
from keel.data.stream import PromptStream
from keel.rl.types import Prompt

CheckReward = Callable[[Mapping[str, Any]], None]
"""Raises ValueError for a reward spec that could not be judged."""
CountTokens = Callable[[Prompt], int]
"""Tokens of a prompt with its chat template."""
LONGEST_TOKEN = 512
"""Characters; runs of spaces or of a sign are the longest that vocabularies have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """Where the prompts of one source went."""

    read: int
    skipped: int
    """Malformed lines."""
    duplicates: int
    """Repeats of a question of the same source."""
    long: int
    """Over `data.max_prompt_tokens`."""
    heldout: int
    leaked: int
    """Left out of training because the question is in the held-out set of another source."""
    train: int
    skipped_reasons: tuple[str, ...] = ()
    rated_out: int = 0
    """Whose pass rate is out of bounds (`pass_rates`)."""
    unrated: tuple[str, ...] = ()
    """Ids of those left out because the table of pass rates does not have them."""
    unknown: tuple[str, ...] = ()
    """Ids of the table's that the source does not have."""
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    """Column that nothing reads → where it was first met."""
    unanswered: int = 0
    """As in `Loaded`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    train: PromptStream
    heldout: Mapping[str, tuple[Prompt, ...]]
    """Source name → its held-out prompts, for sources that have any. They never train."""
    reserved: frozenset[str]
    """What those ask, by `Item.asked`: with their templates and without."""
    report: Mapping[str, SourceReport]


@dataclass(slots=True)
class _Split:
    """One source on its way to the dataset."""

    source: SourceConfig
    loaded: Loaded
    duplicates: int
    long: int
    heldout: list[Item]
    train: list[Item]
    rated_out: int = 0
    unrated: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def load_dataset(
    config: DataConfig,
    *,
    seed: int,
    count_tokens: CountTokens | None = None,
    check_reward: CheckReward | None = None,
    hub_answers: Callable[[], bool] = lambda: True,
) -> Dataset:
    """Read every source and set its held-out prompts aside.

    Every distinct question is kept once, and a question held out by any source trains in none:
    procedural generators repeat themselves. Without `count_tokens` lengths are not checked,
    and without `check_reward` what lines of files say about their reward is not. hub_answers: see
    `load_jsonl`.

    Raises ConfigError for sources that cannot be read, prompts that are too long (under
    `long_prompts: error`) and sources with too few distinct questions.
    """
    splits = [
        _split(_loaded(source, seed, check_reward, hub_answers), source, config, seed, count_tokens)
        for source in config.sources
    ]
    reserved = frozenset(key for split in splits for item in split.heldout for key in item.asked)
    train: dict[str, list[Prompt]] = {}
    report: dict[str, SourceReport] = {}
    for split in splits:
        source = split.source
        kept = [item.prompt for item in split.train if reserved.isdisjoint(item.asked)]
        if config.weight_of(source) > 0 and not kept:
            raise ConfigError(
                f"data.sources[{source.name}]: no prompt is left to train on "
                f"({len(split.loaded.items)} read, {split.duplicates} repeated, {split.long} over "
                f"data.max_prompt_tokens = {config.max_prompt_tokens}, {len(split.heldout)} held "
                f"out, {split.rated_out + len(split.unrated)} left out by pass_rates, "
                f"{len(split.train)} held out by another source); raise its size or "
                "data.max_prompt_tokens, lower its holdout or widen the bounds of its pass rates"
            )
        train[source.name] = kept
        report[source.name] = SourceReport(
            read=len(split.loaded.items) + len(split.loaded.skipped),
            skipped=len(split.loaded.skipped),
            duplicates=split.duplicates,
            long=split.long,
            heldout=len(split.heldout),
            leaked=len(split.train) - len(kept),
            train=len(kept) if config.weight_of(source) > 0 else 0,
            skipped_reasons=split.loaded.skipped,
            rated_out=split.rated_out,
            unrated=split.unrated,
            unknown=split.unknown,
            unread=split.loaded.unread,
            unanswered=split.loaded.unanswered,
        )
    return Dataset(
        train=PromptStream(
            train, weights={each.name: config.weight_of(each) for each in config.sources}, seed=seed
        ),
        heldout={
            split.source.name: tuple(item.prompt for item in split.heldout)
            for split in splits
            if split.heldout
        },
        reserved=reserved,
        report=report,
    )


def _loaded(
    source: SourceConfig,
    seed: int,
    check_reward: CheckReward | None,
    hub_answers: Callable[[], bool],
) -> Loaded:
    if source.source == "reasoning_gym":
        return load_reasoning_gym(source, seed=seed)
    if source.source == "environment":
        return load_episodes(source)
    return load_jsonl(source, check_reward, hub_answers)


def _split(
    loaded: Loaded,
    source: SourceConfig,
    config: DataConfig,
    seed: int,
    count_tokens: CountTokens | None,
) -> _Split:
    first: dict[str, Item] = {}
    for item in loaded.items:
        first.setdefault(item.question, item)
    distinct = list(first.values())
    short = _short_enough(distinct, config, count_tokens)
    long = len(distinct) - len(short)
    wanted = len(short) if source.holdout == "all" else source.holdout
    spare = len(short) - wanted
    if wanted and (spare < 0 or (config.weight_of(source) > 0 and spare == 0)):
        over = f"{long} more are over data.max_prompt_tokens = {config.max_prompt_tokens}; raise "
        cure = f"{over}that" if long else "make the source larger or more varied"
        none = "" if spare else ", of which none would be left to train on"
        none += " (holdout: all makes it an evaluation set)" * bool(none)
        raise ConfigError(
            f"data.sources[{source.name}].holdout = {source.holdout}: there are only {len(short)} "
            f"distinct questions of a usable length among {len(loaded.items)} prompts{none}, and "
            f"those held out never train; {cure}, or lower the holdout"
        )
    held = _choose_heldout(short, source, seed, wanted)
    split = _Split(
        source=source,
        loaded=loaded,
        duplicates=len(loaded.items) - len(distinct),
        long=long,
        heldout=[item for item in short if item.question in held],
        train=[item for item in short if item.question not in held],
    )
    if source.pass_rates:
        _keep_rated(split)
    return split


def _keep_rated(split: _Split) -> None:
    """Leave only prompts to train on whose pass rate is known and within the source's bounds."""
    source, path = split.source, data_path(split.source.pass_rates)
    knob = f"data.sources[{source.name}].pass_rates = {source.pass_rates!r}"
    try:
        table = read_pass_rates(path)
        rates = {name: rate for name, rate in table.items() if rate.source == source.name}
        if not rates:
            others = ", ".join(sorted({rate.source for rate in table.values()})) or "none at all"
            raise ValueError(f"{path}: has no prompt of this source; its sources: {others}")
        rated: list[Item] = []
        for item in split.train:
            if (rate := rates.get(item.prompt.prompt_id)) and rate.known:
                check_same(item.prompt, rate, path)
                rated.append(item)
    except ValueError as error:
        raise ConfigError(f"{knob}: {error}") from error
    bounds = (source.least_pass_rate, source.most_pass_rate)
    kept = [item for item in rated if rates[item.prompt.prompt_id].within(*bounds)]
    names, there = (
        {item.prompt.prompt_id for item in split.train},
        {i.prompt.prompt_id for i in rated},
    )
    split.unrated = tuple(sorted(names - there))
    split.unknown = tuple(sorted(rates.keys() - {i.prompt.prompt_id for i in split.loaded.items}))
    split.rated_out = len(rated) - len(kept)
    split.train = kept


def _choose_heldout(items: list[Item], source: SourceConfig, seed: int, count: int) -> set[str]:
    """Draw `count` questions to hold out.

    Generated items are drawn independently, so the first will do, and they stay the same when
    the source grows. Files have an order of their own: there a hash draws the lot.
    """
    questions = [item.question for item in items]
    if source.has_rows:
        questions.sort(key=lambda question: digest(f"{seed}/{source.name}/{question}"))
    return set(questions[:count])


def _short_enough(
    items: Iterable[Item], config: DataConfig, count: CountTokens | None
) -> list[Item]:
    short: list[Item] = []
    for item in items:
        # What cannot be short enough is not tokenized, which takes 200 times its size in memory.
        least = sum(len(str(m.get("content"))) for m in item.prompt.messages) // LONGEST_TOKEN
        counted = count is not None and least <= config.max_prompt_tokens
        tokens = count(item.prompt) if counted and count is not None else least
        if tokens <= config.max_prompt_tokens:
            short.append(item)
        elif config.long_prompts == "error":
            raise ConfigError(
                f"prompt {item.prompt.prompt_id} ({item.origin}) has {tokens} tokens"
                f"{'' if counted else ' or more'}, more than "
                f"data.max_prompt_tokens = {config.max_prompt_tokens}: raise it, or set "
                "data.long_prompts: drop to leave such prompts out"
            )
    return short
