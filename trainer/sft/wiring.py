"""Wiring of `keel sft` and `keel pretrain`: from a recipe to its conversations or text in ids, to
ranks that learn from them.

Sees every package, as `trainer/prepare.py` and `commands/train.py` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar

from keel.configs.load import load_config, load_recipe
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.model import TINY_MODEL
from keel.configs.sections.sft import TEXT
from keel.data.conversations.load import Lessons, load_lessons
from keel.data.conversations.text import Encoded
from keel.data.conversations.types import Example, Render
from keel.data.dataset import Dataset
from keel.model.hub import from_anywhere, hub_answers
from keel.model.load import ModelFacts, digest_of_tokenizer
from keel.model.tiny.build import ensure_tiny_model
from keel.model.tiny.cold_start import Curriculum
from keel.model.tiny.solutions import TAUGHT
from keel.model.trainable import check_ids
from keel.rl.sft import supervised_segment
from keel.rl.turns import ToolSpec
from keel.rl.types import Segment
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.encoding import Encoder, free_marks
from keel.rollout.chat.render_given import taught
from keel.rollout.chat.template_checks import check_prefix_law
from keel.trainer.launch import counted, fetch, fetch_elsewhere, start_of
from keel.trainer.learner import Learner
from keel.trainer.placement.choose import Choice
from keel.trainer.placement.elastic import ElasticLayouts
from keel.trainer.placement.families import check_indexer_length
from keel.trainer.placement.hardware import RANK, Hardware
from keel.trainer.placement.lint import ignored_knobs
from keel.trainer.placement.nodes import detect_hardware, start_ray, stop_ray
from keel.trainer.placement.oom_recovery import OomRecovery, RetryOnOom
from keel.trainer.placement.plan import Plan, model_line, ranks_line
from keel.trainer.placement.reservation import reserve_gpus
from keel.trainer.placement.watchdog import Watchdog, start_watchdog
from keel.trainer.prepare import (
    ending_lines,
    found_model,
    has_chats,
    prompts_of,
    warning_lines,
)
from keel.trainer.run.checkpoint import latest_complete, read_state
from keel.trainer.run.folder import RunFolder, check_recipe
from keel.trainer.run.progress import waiting
from keel.trainer.run.session import open_journal, save_checkpoint
from keel.trainer.run.signals import Interrupt
from keel.trainer.run.view import View
from keel.trainer.sft import loop as sft

PREEMPTED_FIRST = "{signal}: stopping after this step, with a checkpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class SftTask:
    """A recipe that has passed every check, with its conversations."""

    config: Config
    """`Config.supervised`: what such a run depends on."""
    lessons: Lessons
    batches: sft.Batches
    facts: ModelFacts
    plan: Plan
    hardware: Hardware
    choice: Choice
    """Of what the recipe left open."""
    tokenizer: str
    """`keel.model.load.digest_of_tokenizer`."""
    given: Config
    """The whole recipe."""
    prompts: Dataset | None
    """Those of `data.sources`, where there are any: what they hold out is learned nowhere, and the
    tiny model's cold start teaches what they ask."""
    format: str
    """Of the chats; empty where there are none."""
    warnings: Sequence[str] = ()

    @property
    def command(self) -> str:
        return "pretrain" if self.config.sft.only_text else "sft"

    @property
    def gpu(self) -> bool:
        return self.hardware.gpu

    def text(self, *, seats: Sequence[str] = ()) -> str:
        """What is planned."""
        config, trainer = self.config, self.config.trainer
        reports = self.lessons.report.items()
        what = "windows" if config.sft.only_text else "conversations"
        size = f"{config.sft.conversations_per_step} {what}"
        if config.sft.tokens_per_step:
            size = f"{what} of at most {config.sft.tokens_per_step:,} tokens together"
        seen = self.batches.passes(config.run.steps)
        passes = f", {seen:.3g} passes over the data" if seen else ""
        passes += " (sft.epochs, and not run.steps)" if config.sft.epochs else ""
        rows = [
            ("model", model_line(config, self.facts)),
            *(("data", line) for name, report in reports for line in report.lines(name)),
            *([("", f"chats are written in the format {self.format}")] if self.format else []),
            (
                "batch",
                f"{size} a step, in micro-batches of {trainer.micro_batch_tokens:,} tokens; the "
                f"loss is a mean over {config.sft.mean}",
            ),
            *([("attention", attention_said(config))] if self.facts.index_top_k else []),
            ("steps", f"{config.run.steps}{passes}; lr {trainer.lr:g} ({trainer.schedule})"),
            ("actors", ranks_line(config, gpu=self.gpu)),
            ("hardware", str(self.hardware) if self.gpu else "on CPU"),
            *(("placement", line) for line in seats),
            ("memory", f"trainer rank: {self.plan.trainer}"),
            ("run folder", config.run.dir),
        ]
        named = ["" if i and rows[i - 1][0] == name else name for i, (name, _) in enumerate(rows)]
        lines = [f"{name:<12} {text}" for name, (_, text) in zip(named, rows, strict=True)]
        return "\n".join([*lines, *ending_lines(self.choice, self.warnings)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Teaching:
    """Ranks that learn, started."""

    task: SftTask
    learner: Learner
    lowering: OomRecovery | None = None
    """What a step that does not fit makes of the recipe."""
    watch: Watchdog | None = None


def prepare_sft(
    recipe: str,
    overrides: Sequence[str],
    *,
    hardware: Callable[[Config], Hardware] = detect_hardware,
) -> SftTask:
    """Read and check everything that needs no ranks. Raises ConfigError."""
    disable_progress_bar()  # transformers' own bars would cut through the view
    given, left = load_recipe(recipe, overrides)
    check_recipe(recipe, overrides, given)
    if not given.sft.sources:
        raise ConfigError("sft.sources: there is none; add one (docs/sft.md, docs/pretrain.md)")
    config = given.supervised(given.run.steps)
    chats = not config.sft.only_text or has_chats(given)
    found = found_model(config, left, hardware, chats=chats)
    config = found.choice.config
    if found.facts.balance_loss:
        raise ConfigError(
            f"model.path = {config.model.path!r}: its config.json asks for a loss that balances "
            f"experts (output_router_logits: true, router_aux_loss_coef: "
            f"{found.facts.balance_loss:g}), and supervised training adds none (docs/sft.md). Set "
            "output_router_logits: false there, in a copy of the folder, to learn without"
        )
    digest = digest_of_tokenizer(found.tokenizer)
    prompts = prompts_of(given, found.tokenizer, found.facts) if given.data.sources else None
    try:
        chat = TemplateChat(found.tokenizer, marks=config.model.thinking_marks) if chats else None
        texts = any(source.is_text for source in config.sft.sources)
        encoded = encoded_by(found.tokenizer) if texts else None
    except ValueError as error:
        name = config.model.tokenizer or config.model.path
        raise ConfigError(f"the tokenizer of {name!r}: {error}") from error
    lessons = load_lessons(
        config.sft,
        seed=config.run.seed,
        render=renderer(chat) if chat else no_chats,
        solve=solved,
        tokenizer=digest,
        encoded=encoded,
        hub_answers=hub_answers,
        reserved=reserved_questions(prompts),
        reserved_ids=reserved_ids(prompts),
    )
    for lesson in chain(*lessons.train.sources.values(), *lessons.heldout.values()):
        for segment in lesson.segments:
            check_ids(segment.token_ids_T, found.facts.vocab_size, segment.prompt_id)
    seen_once = sum(s.repeat * lessons.report[s.name].learned for s in config.sft.sources)
    batches = sft.Batches(lessons.train, config.sft, epoch=seen_once)
    if config.sft.epochs:
        config = replace(config, run=replace(config.run, steps=steps_in_all(config, batches)))
    if config.sft.only_text:
        longest = max(report.longest for report in lessons.report.values())
        check_indexer_length(config, top_k=found.facts.index_top_k, longest=longest)
    return SftTask(
        config=config,
        lessons=lessons,
        batches=batches,
        facts=found.facts,
        plan=found.choice.plan,
        hardware=found.hardware,
        choice=found.choice,
        tokenizer=digest,
        given=given,
        prompts=prompts,
        format=chat.format.name if chat and not config.sft.only_text else "",
        warnings=[*warning_lines(config, found), *ignored_knobs(given, left, overrides)],
    )


def prepare_pretraining(recipe: str, overrides: Sequence[str]) -> SftTask:
    """The same for text alone. Raises ConfigError."""
    config = load_config(recipe, overrides)
    others = [source.name for source in config.sft.sources if not source.is_text]
    if others or not config.sft.sources:
        is_of = f"{', '.join(others)}: no text" if others else "there is none"
        raise ConfigError(
            f"sft.sources: {is_of}. `keel pretrain` learns from source: {' and '.join(TEXT)} "
            "(docs/pretrain.md), `keel sft` from conversations, and from both"
        )
    return prepare_sft(recipe, overrides)


def steps_in_all(config: Config, batches: sft.Batches) -> int:
    """Those of `sft.epochs`, with what has been done of them: a run that ended with fewer epochs,
    and goes on for more, has cut the last batch of those short."""
    beginning, done = batches.position(), 0
    if newest := latest_complete(Path(config.run.dir).expanduser() / "checkpoints"):
        with suppress(ValueError, LookupError, TypeError):  # whoever resumes says what is wrong
            state = read_state(newest)
            batches.restore(state.cursor)
            done = state.step
    steps = done + batches.steps_of(config.sft.epochs)
    batches.restore(beginning)
    return steps


def attention_said(config: Config) -> str:
    """What is trained of a model with an indexer."""
    return {
        "warm-up": "dense; the indexers alone are trained, by Eq. 3",
        "dense": "dense; everything but the indexers is trained",
        "sparse": "sparse; the indexers are trained by Eq. 4 alone, the rest by the model's loss",
    }[config.trainer.attention]


def encoded_by(tokenizer: Any) -> Encoded:
    """Text as a base model knows it: what the tokenizer itself puts before a text, then the text,
    in which nothing becomes a control token, then the end of text. Raises ValueError for a
    tokenizer that cannot tell control tokens from text."""
    encoder, end = Encoder(tokenizer), tokenizer.eos_token_id
    before = [index for index in tokenizer("")["input_ids"] if index != end]

    def encode(text: str) -> list[int]:
        marks = free_marks(text)
        return encoder.encode(encoder.shield(text, marks), marks)

    return Encoded(encode, tuple(before), (end,))


def no_chats(example: Example) -> list[Segment]:
    """In the place of a renderer where a recipe has nothing but text, which comes in ids."""
    raise AssertionError(f"{example.origin}: rendered as a conversation")


def renderer(chat: TemplateChat) -> Render:
    """Conversations in ids by the code of rollouts (`keel.rollout.chat.render_given`)."""
    proven: set[tuple[bool, bool]] = set()

    def render(example: Example) -> list[Segment]:
        tools = [
            ToolSpec(
                name=function["name"],
                description=str(function["description"]),
                parameters=function["parameters"],
            )
            for function in (tool["function"] for tool in example.tools)
        ]
        kind = (example.thinking, bool(tools))
        if len(example.trained) > 1 and kind not in proven:
            prove = check_prefix_law if tools else partial(check_prefix_law, tools=())
            prove(chat, modes=(example.thinking,))
            proven.add(kind)
        contexts = taught(
            chat, example.messages, tools, thinking=example.thinking, trained=example.trained
        )
        return [
            supervised_segment(example.origin, context.ids, context.said) for context in contexts
        ]

    return render


def solved(task: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """The answer to a question of reasoning_gym, worked out."""
    taught_so = TAUGHT.get(task)
    if taught_so is None or not taught_so.covers(entry["metadata"]):
        return None
    working = taught_so.working(entry["metadata"])
    return {"role": "assistant", "content": str(entry["answer"]), "reasoning_content": working}


def reserved_questions(dataset: Dataset | None) -> set[str]:
    """Those that the recipe's prompts hold out, so that nobody learns what is measured."""
    return set(dataset.reserved) if dataset is not None else set()


def reserved_ids(dataset: Dataset | None) -> set[str]:
    """Names of the same prompts."""
    heldout = dataset.heldout if dataset is not None else {}
    return {prompt.prompt_id for prompts in heldout.values() for prompt in prompts}


@contextmanager
def teaching(
    task: SftTask, say: Callable[[str], None], *, layouts: ElasticLayouts
) -> Iterator[Teaching]:
    """Start the ranks that `task` needs, and end them at exit, whatever happened. layouts: has the
    recipe as it is by now."""
    config, deadline = task.config, task.config.run.startup_timeout_s
    fetch(config.model.path)
    with ExitStack() as stack:
        with waiting("starting Ray", "Ray"):
            start_ray()
        stack.callback(stop_ray)
        config = layouts.next()
        task = replace(task, config=config)
        seats = None
        if task.gpu:
            seats = stack.enter_context(reserve_gpus(config, timeout_s=deadline))
            for line in seats.placement.lines():
                say(line)
        fetch_elsewhere(config.model.path, seats, (RANK,), deadline)
        watch = stack.enter_context(start_watchdog(say, config.run.hang_timeout_s))
        learner = Learner(
            starting_model(task),
            config,
            gpu=task.gpu,
            actor_options=partial(seats.options, RANK) if seats else None,
        )
        stack.callback(learner.shutdown)
        who = f"starting {counted(config.trainer.ranks, 'trainer rank')}"
        with waiting(who, f"{who} of {config.model.path}, GPUs: {task.gpu}"):
            learner.prepared()
            warnings = learner.start()
        for line in warnings:
            say(f"warning: {line}")
        yield Teaching(task=task, learner=learner, lowering=layouts.lowering, watch=watch)


def starting_model(task: SftTask) -> str:
    """Where the weights are. The tiny model begins as `keel train` would have it on the
    recipe's `data.sources`; without these, or with no steps of its cold start, with random
    weights: then this is its cold start."""
    config, tiny = task.config, task.config.model.tiny
    if config.model.path != TINY_MODEL:
        return from_anywhere(config.model.path)
    if task.prompts is not None and tiny.cold_start.steps:
        return start_of(task.given, task.prompts, gpu=task.gpu)
    untaught = replace(tiny, cold_start=replace(tiny.cold_start, steps=0))
    return str(ensure_tiny_model(untaught, Curriculum(seed=config.run.seed)))


def run_lessons(system: Teaching, folder: RunFolder, view: View, start: int) -> int:
    """The loop of `keel.trainer.sft.loop` on the real parts; returns the last step done."""
    task, learner = system.task, system.learner
    with ExitStack() as stack:
        journal = open_journal(
            stack, folder, view, task.config, start=start, tokenizer=task.tokenizer
        )
        if system.watch is not None:
            system.watch.say = partial(journal.say, "frozen")
        grace_s = task.config.run.grace_s
        stop = stack.enter_context(
            Interrupt(view.say, preempted_first=PREEMPTED_FIRST, grace_s=grace_s)
        )
        attempt = None
        if (lowering := system.lowering) is not None:
            say = partial(journal.say, "out of memory")
            attempt = RetryOnOom(learner=learner, lowering=lowering, say=say).attempt
        parts = sft.Parts(
            batches=task.batches,
            learner=learner,
            journal=journal,
            heldout=task.lessons.heldout if task.config.run.eval_every >= 0 else {},
            save=partial(save_checkpoint, folder, task.config, learner, stop=stop, say=view.say),
            stop=stop,
            say=view.say,
            hurry=stop.should_abort,
            attempt=attempt,
        )
        return sft.fit(parts, task.config, start=start)
