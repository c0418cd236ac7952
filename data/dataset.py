"""Read all data sources of a recipe, remove duplicates, and split off held-out prompts. Also
describes the sources for the user."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from keel.configs.schema import Config, ConfigError, DataConfig, SourceConfig
from keel.configs.sections.data import ROWS
from keel.data.items import Item, Loaded, digest, first_lines, make_prompt
from keel.data.jsonl import load_jsonl
from keel.data.procedural import load_reasoning_gym
from keel.data.stream import Stream
from keel.rl.types import ENVIRONMENT, Prompt

_CheckReward = Callable[[Mapping[str, Any]], None]
_CountTokens = Callable[[Prompt], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class _SourceReport:
    train: int
    heldout: int
    dropped: Mapping[str, int]  # number of dropped prompts for each reason
    skipped: tuple[str, ...]  # reason for skipping each malformed row


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """All of a run's prompts, split into training and held-out prompts."""

    train: Stream[Prompt]
    heldout: Mapping[str, tuple[Prompt, ...]]
    """Held-out prompts by source name, never used for training."""
    reserved: frozenset[str]  # question digests (`Item.questions`) of all held-out prompts
    report: Mapping[str, _SourceReport]


class _Split(NamedTuple):
    loaded: Loaded
    heldout: list[Item]
    train: list[Item]
    dropped: dict[str, int]


def load_dataset(
    config: DataConfig,
    *,
    seed: int,
    count_tokens: _CountTokens = lambda prompt: 0,
    check_reward: _CheckReward = lambda spec: None,
) -> Dataset:
    """Read every source, remove duplicate questions, and split off the held-out prompts. A question
    held out by one source isn't used for training in any other.

    `count_tokens` returns the length of a rendered prompt. `check_reward` is passed on to
    `load_jsonl`. Raises ConfigError if a source can't be read or has too few distinct
    questions, or if a prompt is too long (under `long_prompts: error`).
    """

    def load(source: SourceConfig) -> Loaded:
        if source.source == "reasoning_gym":
            return load_reasoning_gym(source, seed=seed)
        if source.source == "environment":
            return _episodes(source)
        return load_jsonl(source, check_reward)

    splits = {s.name: _split(load(s), s, config, seed, count_tokens) for s in config.sources}
    held = [item for split in splits.values() for item in split.heldout]
    reserved = frozenset(question for item in held for question in item.questions)
    train: dict[str, list[Prompt]] = {}
    report: dict[str, _SourceReport] = {}
    for source in config.sources:
        split = splits[source.name]
        prompts = [item.prompt for item in split.train if reserved.isdisjoint(item.questions)]
        split.dropped["held out by another source"] = len(split.train) - len(prompts)
        trains = config.weight_of(source) > 0
        if trains and not prompts:
            counts = {**split.dropped, "held out": len(split.heldout)}
            whys = ", ".join(f"{count} {reason}" for reason, count in counts.items() if count)
            raise ConfigError(
                f"data.sources[{source.name}]: no prompt is left to train on "
                f"({len(split.loaded.items)} read, {whys}; data.max_prompt_tokens = "
                f"{config.max_prompt_tokens})"
            )
        train[source.name] = prompts
        report[source.name] = _SourceReport(
            train=len(prompts) if trains else 0,
            heldout=len(split.heldout),
            dropped=split.dropped,
            skipped=split.loaded.skipped,
        )

    def content(prompt: Prompt) -> str:
        return f"{prompt.prompt_id} {prompt.messages} {prompt.reward}"

    weights = {source.name: config.weight_of(source) for source in config.sources}
    return Dataset(
        train=Stream(train, weights=weights, seed=seed, content=content),
        heldout={
            name: tuple(item.prompt for item in split.heldout)
            for name, split in splits.items()
            if split.heldout
        },
        reserved=reserved,
        report=report,
    )


def _episodes(source: SourceConfig) -> Loaded:
    """Create placeholder prompts for the tasks of an environment that starts its own
    conversations."""
    items: list[Item] = []
    for index in range(source.size):
        message = {"role": "user", "content": f"(task {source.name}/{index})"}
        prompt = make_prompt(source, index, [message], {"kind": ENVIRONMENT})
        items.append(Item(prompt=prompt, origin=prompt.prompt_id))
    return Loaded(items=tuple(items))


def _split(
    loaded: Loaded, source: SourceConfig, config: DataConfig, seed: int, count_tokens: _CountTokens
) -> _Split:
    by_question: dict[str, Item] = {}
    for item in loaded.items:
        by_question.setdefault(item.question, item)
    short: list[Item] = []
    for item in by_question.values():
        tokens = count_tokens(item.prompt)
        if tokens <= config.max_prompt_tokens:
            short.append(item)
        elif config.long_prompts == "error":
            raise ConfigError(
                f"prompt {item.prompt.prompt_id} ({item.origin}) has {tokens} tokens, more than "
                f"data.max_prompt_tokens = {config.max_prompt_tokens}; raise it, or set "
                "data.long_prompts: drop"
            )
    long = len(by_question) - len(short)
    holdout = len(short) if source.holdout == "all" else source.holdout
    remaining = len(short) - holdout
    limit = f"data.max_prompt_tokens = {config.max_prompt_tokens}"
    without = f", without the {long} that exceed {limit}" if long else ""
    if holdout and (remaining < 0 or (config.weight_of(source) > 0 and remaining == 0)):
        raise ConfigError(
            f"data.sources[{source.name}].holdout = {source.holdout}: there are only {len(short)} "
            f"distinct questions{without}. Lower it, or set holdout: all to only evaluate"
        )
    questions = [item.question for item in short]
    # Generated items are independent, so the first ones are held out; they stay the same if the
    # source grows. Files may be sorted, so their questions are chosen by hash.
    if source.source in ROWS:
        questions.sort(key=lambda question: digest(f"{seed}/{source.name}/{question}"))
    heldout = set(questions[:holdout])
    return _Split(
        loaded=loaded,
        heldout=[item for item in short if item.question in heldout],
        train=[item for item in short if item.question not in heldout],
        dropped={
            "malformed": len(loaded.skipped),
            "duplicate": len(loaded.items) - len(by_question),
            "too long": long,
        },
    )


def source_warnings(config: Config, dataset: Dataset) -> list[str]:
    """Return warnings about prompts that occur more than once in a batch."""
    lines: list[str] = []
    for source in config.data.sources:
        report, knob = dataset.report[source.name], f"data.sources[{source.name}]"
        times = _epochs(config, source, report.train) / config.run.steps
        if report.train and times > 1:
            lines.append(
                f"{knob}: {report.train:,} prompts to train on, each {times:.3g} times in a batch; "
                "lower algorithm.prompts_per_step"
            )
    return lines


def source_lines(config: Config, dataset: Dataset) -> list[str]:
    """Describe each source along with its prompts and limits, as lines of text."""
    lines: list[str] = []
    for source in config.data.sources:
        report = dataset.report[source.name]
        notes = [f"{report.train:,} to train on", f"{report.heldout:,} held out"]
        if epochs := _epochs(config, source, report.train):
            notes.append(f"{epochs:.2g} epochs")
        notes += [f"{number:,} {reason}" for reason, number in report.dropped.items() if number]
        environment = source.environment
        origin = " in ".join(filter(None, [source.task or source.path, environment.label]))
        if environment.program:
            origin = ", driven by ".join(filter(None, [origin, environment.program]))
        budget = {name: value for name, value in asdict(source.budget).items() if value}
        lines.append(
            f"{source.name} ({origin}): {', '.join(notes)}; weight "
            f"{config.data.weight_of(source):g}, domain {source.domain_name}, β {source.kl_coef:g}"
            + f", teacher {source.teacher}" * bool(source.teacher)
            + "".join(f", {name} {value:g}" for name, value in budget.items())
        )
        lines += [f"  skipped: {line}" for line in first_lines(report.skipped)]
    return lines


def _epochs(config: Config, source: SourceConfig, prompts: int) -> float:
    total = sum(config.data.weight_of(one) for one in config.data.sources) or 1.0
    share = config.data.weight_of(source) / total
    return share * config.run.steps * config.algorithm.prompts_per_step / max(1, prompts)
