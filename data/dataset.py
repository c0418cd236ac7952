"""Reads all data sources in a recipe, removes duplicates, and splits off held-out prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from keel.configs.paths import data_path
from keel.configs.schema import ConfigError, DataConfig, SourceConfig
from keel.data.items import Item, Loaded, digest
from keel.data.jsonl import load_jsonl
from keel.data.pass_rates import check_same, read_pass_rates
from keel.data.procedural import load_episodes, load_reasoning_gym
from keel.data.stream import PromptStream
from keel.rl.types import Prompt

_CheckReward = Callable[[Mapping[str, Any]], None]
_CountTokens = Callable[[Prompt], int]
_MAX_TOKEN_CHARACTERS = 512
"""The most characters that one token can have. The longest are runs of spaces or of one sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """How many prompts a source has, and how many were dropped for which reason."""

    read: int
    skipped: int
    """Lines that were malformed."""
    duplicates: int
    """Questions that occurred earlier in the same source."""
    long: int
    """Prompts longer than `data.max_prompt_tokens`."""
    heldout: int
    leaked: int
    """Questions that another source holds out."""
    train: int
    skipped_reasons: tuple[str, ...] = ()
    rated_out: int = 0
    """Prompts whose pass rate is out of bounds."""
    unrated: tuple[str, ...] = ()
    """IDs of the prompts that were dropped because they have no pass rate."""
    unknown: tuple[str, ...] = ()
    """IDs in the pass-rate table that do not occur in the source."""
    unread: Mapping[str, str] = field(default_factory=dict[str, str])
    """Maps each unused column to the place where it first occurred."""
    unanswered: int = 0
    """As in `Loaded.unanswered`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """All prompts for a run."""

    train: PromptStream
    heldout: Mapping[str, tuple[Prompt, ...]]
    """Maps source names to their held-out prompts, which are never used for training."""
    reserved: frozenset[str]
    """The `Item.questions` of all held-out prompts."""
    report: Mapping[str, SourceReport]


@dataclass(slots=True)
class _Split:
    """The state of one source while it is being processed."""

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
    count_tokens: _CountTokens = lambda prompt: 0,
    check_reward: _CheckReward = lambda spec: None,
    hub_answers: Callable[[], bool] = lambda: True,
) -> Dataset:
    """Read every source and set its held-out prompts aside.

    Each distinct question is used only once, because procedural generators repeat themselves. A
    question held out by one source is not used for training in any other.

    `count_tokens` returns the length of a prompt with its chat template, and `check_reward` raises
    ValueError for a bad reward spec. `hub_answers` is described in `load_jsonl`.

    Raises ConfigError if a source cannot be read or has too few distinct questions, or if a prompt
    is too long (under `long_prompts: error`).
    """

    def load(source: SourceConfig) -> Loaded:
        if source.source == "reasoning_gym":
            return load_reasoning_gym(source, seed=seed)
        if source.source == "environment":
            return load_episodes(source)
        return load_jsonl(source, check_reward, hub_answers)

    splits = [_split(load(source), source, config, seed, count_tokens) for source in config.sources]
    reserved = frozenset(q for split in splits for item in split.heldout for q in item.questions)
    train: dict[str, list[Prompt]] = {}
    report: dict[str, SourceReport] = {}
    for split in splits:
        source = split.source
        prompts = [item.prompt for item in split.train if reserved.isdisjoint(item.questions)]
        trains = config.weight_of(source) > 0
        if trains and not prompts:
            raise ConfigError(
                f"data.sources[{source.name}]: no prompt is left to train on "
                f"({len(split.loaded.items)} read, {split.duplicates} repeated, {split.long} over "
                f"data.max_prompt_tokens = {config.max_prompt_tokens}, {len(split.heldout)} held "
                f"out, {split.rated_out + len(split.unrated)} dropped by pass_rates, "
                f"{len(split.train)} held out by another source)"
            )
        train[source.name] = prompts
        report[source.name] = SourceReport(
            read=len(split.loaded.items) + len(split.loaded.skipped),
            skipped=len(split.loaded.skipped),
            duplicates=split.duplicates,
            long=split.long,
            heldout=len(split.heldout),
            leaked=len(split.train) - len(prompts),
            train=len(prompts) if trains else 0,
            skipped_reasons=split.loaded.skipped,
            rated_out=split.rated_out,
            unrated=split.unrated,
            unknown=split.unknown,
            unread=split.loaded.unread,
            unanswered=split.loaded.unanswered,
        )
    weights = {source.name: config.weight_of(source) for source in config.sources}
    return Dataset(
        train=PromptStream(train, weights=weights, seed=seed),
        heldout={
            split.source.name: tuple(item.prompt for item in split.heldout)
            for split in splits
            if split.heldout
        },
        reserved=reserved,
        report=report,
    )


def _split(
    loaded: Loaded,
    source: SourceConfig,
    config: DataConfig,
    seed: int,
    count_tokens: _CountTokens,
) -> _Split:
    by_question: dict[str, Item] = {}
    for item in loaded.items:
        by_question.setdefault(item.question, item)
    short: list[Item] = []
    for item in by_question.values():
        # A prompt that is certainly too long is not tokenized, which takes 200 times its memory.
        characters = sum(len(str(m.get("content"))) for m in item.prompt.messages)
        tokens = characters // _MAX_TOKEN_CHARACTERS
        if tokens <= config.max_prompt_tokens:
            tokens = count_tokens(item.prompt)
        if tokens <= config.max_prompt_tokens:
            short.append(item)
        elif config.long_prompts == "error":
            raise ConfigError(
                f"prompt {item.prompt.prompt_id} ({item.origin}) has at least {tokens} tokens, "
                f"more than data.max_prompt_tokens = {config.max_prompt_tokens}; raise it, or set "
                "data.long_prompts: drop"
            )
    long = len(by_question) - len(short)
    holdout = len(short) if source.holdout == "all" else source.holdout
    remaining = len(short) - holdout
    if holdout and (remaining < 0 or (config.weight_of(source) > 0 and remaining == 0)):
        none = "" if remaining else ", so none is left to train on (evaluate with holdout: all)"
        raise ConfigError(
            f"data.sources[{source.name}].holdout = {source.holdout}: there are only {len(short)} "
            f"distinct questions among {len(loaded.items)} prompts, without the {long} that exceed "
            f"data.max_prompt_tokens = {config.max_prompt_tokens}{none}. Lower the holdout, or "
            "make the source larger or more varied"
        )
    questions = [item.question for item in short]
    # Generated items are independent, so the first ones are held out; they stay the same if the
    # source grows. Files may be sorted, so their questions are chosen by hash.
    if source.has_rows:
        questions.sort(key=lambda question: digest(f"{seed}/{source.name}/{question}"))
    heldout = set(questions[:holdout])
    split = _Split(
        source=source,
        loaded=loaded,
        duplicates=len(loaded.items) - len(by_question),
        long=long,
        heldout=[item for item in short if item.question in heldout],
        train=[item for item in short if item.question not in heldout],
    )
    if source.pass_rates:
        _filter_by_pass_rate(split)
    return split


def _filter_by_pass_rate(split: _Split) -> None:
    """Keep only the training prompts whose pass rate is known and within the source's bounds."""
    source, path = split.source, data_path(split.source.pass_rates)
    try:
        table = read_pass_rates(path)
        rates = {name: rate for name, rate in table.items() if rate.source == source.name}
        if not rates:
            others = ", ".join(sorted({rate.source for rate in table.values()})) or "none"
            raise ValueError(f"{path} has no prompt of this source; its sources: {others}")
        rated: list[Item] = []
        for item in split.train:
            if (rate := rates.get(item.prompt.prompt_id)) and rate.known:
                check_same(item.prompt, rate, path)
                rated.append(item)
    except ValueError as error:
        knob = f"data.sources[{source.name}].pass_rates = {source.pass_rates!r}"
        raise ConfigError(f"{knob}: {error}") from error
    bounds = (source.least_pass_rate, source.most_pass_rate)
    within = [item for item in rated if rates[item.prompt.prompt_id].within(*bounds)]
    known = {item.prompt.prompt_id for item in rated}
    every = {item.prompt.prompt_id for item in split.loaded.items}
    split.unrated = tuple(sorted({item.prompt.prompt_id for item in split.train} - known))
    split.unknown = tuple(sorted(rates.keys() - every))
    split.rated_out = len(rated) - len(within)
    split.train = within
