"""From a recipe to what can be said of it before anything starts: its data, its plan, its errors.

Beside `commands/train.py`, which starts what was prepared here, the only file that sees data,
rewards
and rollouts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers.utils.logging import disable_progress_bar

from keel.configs.load import load_recipe
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.model import TINY_MODEL
from keel.configs.system_prompts import system_prompt
from keel.data.dataset import Dataset, load_dataset
from keel.data.summary import literal_lines, small_lines, source_lines, unread_lines
from keel.model.batch_invariant.layers import check_invariant
from keel.model.config_file import ignored_code
from keel.model.hub import hub_answers, local_folder, missing_weights
from keel.model.load import (
    ModelFacts,
    digest_of_tokenizer,
    facts_of,
    load_model_config,
    load_tokenizer,
)
from keel.model.tiny.build import model_config
from keel.model.tiny.cold_start import taught_sources
from keel.model.tiny.tokenizer import build_tokenizer
from keel.model.trainable import check_ids, check_same_family, trainable_facts
from keel.rewards.checks import FAILED, check_prompts, check_spec, try_functions
from keel.rewards.code.verifier import CodeSettings
from keel.rewards.compose import REFUSAL, check_weights
from keel.rewards.judge.specs import is_judged
from keel.rewards.length import LengthRule
from keel.rl.turns import THINK
from keel.rl.types import Prompt
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.render import name_of
from keel.rollout.chat.thinking import marks_of
from keel.rollout.engine.conversion import render_prompt
from keel.trainer.build_agents import check_chat, check_environments
from keel.trainer.placement.cached_choice import SavedChoice, load_choice
from keel.trainer.placement.choose import Choice, choose
from keel.trainer.placement.cpus import cpu_time, slow_dtype, with_dtype
from keel.trainer.placement.families import (
    check_engine_attention,
    check_engine_dtype,
    check_engine_heads,
    check_residual,
)
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.lint import lint_recipe
from keel.trainer.placement.memory import GIB
from keel.trainer.placement.nodes import detect_hardware, memory_gib, with_missing_nodes
from keel.trainer.placement.plan import Plan, describe
from keel.trainer.run.folder import check_recipe
from keel.trainer.run.manifest import MANIFEST, check_exported

UNKNOWN_GIB = (
    "run.gpu_gib is not set and no GPU is here, so GPUs could not be planned: open knobs have "
    "their values for a CPU. Set the memory of a GPU, for example run.gpu_gib=80"
)
SAMPLED = 32
"""Prompts of each source whose mean length stands for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A recipe that has passed every check, with its data."""

    config: Config
    """With what it left open decided."""
    dataset: Dataset
    facts: ModelFacts
    plan: Plan
    hardware: Hardware
    choice: Choice
    """Of what the recipe left open."""
    tokenizer: Any = None
    """Of transformers."""
    programs: Mapping[str, str] = field(default_factory=dict[str, str])
    """As `check_rewards`, and what environments and the chat format are like."""
    chat: TemplateChat | None = None
    """The model's format, where a source has an environment."""
    tokenizer_digest: str = ""
    """`keel.model.load.digest_of_tokenizer`."""
    warnings: Sequence[str] = ()
    failed: Sequence[str] = ()
    """Reward functions that failed on a sample completion, among the warnings."""

    @property
    def gpu(self) -> bool:
        return self.hardware.gpu

    @property
    def judged(self) -> bool:
        """Whether any prompt needs a judge."""
        return needs_judge(self.config, self.dataset)

    def text(
        self, *, seats: Sequence[str] = (), trains: bool = True, evaluates: bool = True
    ) -> str:
        """The plan; `evaluates` says whether the command measures the sets of `eval.prompts`."""
        lines = source_lines(self.config, self.dataset)
        lines += [f"{name}: {note}" for name, note in self.programs.items()]
        text = describe(
            *(self.config, self.facts, self.plan, lines),
            hardware=self.hardware,
            seats=seats,
            cpu_time=self._cpu_time(trains=trains, evaluates=evaluates),
            trains=trains,
        )
        return "\n".join([text, *ending_lines(self.choice, self.warnings)])

    def _cpu_time(self, *, trains: bool, evaluates: bool) -> list[str]:
        """Estimated times on a CPU; none for episodes, whose turns are not known in advance."""
        evaluates &= not trains or self.config.run.eval_every >= 0
        if self.gpu or self.config.with_agents or not (trains or evaluates):
            return []
        train, heldout = self.dataset.train.sources, self.dataset.heldout
        prompts = [p for each in train.values() for p in each[:SAMPLED]]
        # `keel eval` has a size, and may ask prompts to train on.
        most = 0 if trains else self.config.eval.size
        asks_train = not trains and self.config.eval.prompts == "train"
        measured = train if asks_train else heldout
        lengths = [prompt_tokens(p, self.tokenizer, self.facts) for p in prompts]
        estimate = cpu_time(
            self.config,
            self.facts,
            prompt_tokens=fmean(lengths),
            heldout=sum(len(each[: most or None]) for each in measured.values()) * evaluates,
        )
        return estimate.lines(trains=trains)


def ending_lines(choice: Choice, warnings: Sequence[str]) -> list[str]:
    """What was chosen and why, and what may be wrong."""
    return [
        *(f"{'' if i else 'chosen':<12} {line}" for i, line in enumerate(choice.lines())),
        *(f"{'warning':<12} {line}" for line in warnings),
    ]


def needs_judge(config: Config, dataset: Dataset) -> bool:
    if any(REFUSAL in weights for weights in config.data.rewards_by_domain.values()):
        return True
    everything = [*dataset.train.sources.values(), *dataset.heldout.values()]
    return any(is_judged(prompt.reward) for prompts in everything for prompt in prompts)


def prepare(
    recipe: str,
    overrides: Sequence[str],
    *,
    hardware: Callable[[Config], Hardware] = detect_hardware,
) -> Task:
    """Read and check everything that needs no engine. Raises ConfigError.

    `hardware`: on what the run is planned; `keel.trainer.placement.nodes` has the choices.
    """
    disable_progress_bar()  # transformers' own bars would cut through the view
    config, left = load_recipe(recipe, overrides)
    check_recipe(recipe, overrides, config)
    require_prompts(config)
    try:
        check_weights(config.data.rewards_by_domain, config.data.domains_with_environments)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    found = found_model(config, left, hardware, chats=has_chats(config))
    config, tokenizer, facts = found.choice.config, found.tokenizer, found.facts
    check_engine_attention(
        config,
        architecture=facts.architecture,
        kv_width=facts.kv_width,
        gpu=found.hardware.gpu,
    )
    if not config.endpoint.base_url:
        check_engine_heads(
            config,
            heads=facts.attention_heads,
            head_size=facts.head_size,
            gpu=found.hardware.gpu,
        )
        if config.model.path == TINY_MODEL and config.model.tiny.cold_start.steps:
            taught_sources(config.data.sources)
    chat = check_chat(config, tokenizer)
    dataset = prompts_of(config, tokenizer, facts)
    tried = check_rewards(config, dataset)
    failed = [f"{name}: {said}" for name, said in tried.items() if said.startswith(FAILED)]
    warnings = [*warning_lines(config, found), *unread_lines(config, dataset)]
    task = Task(
        config=config,
        dataset=dataset,
        facts=facts,
        plan=found.choice.plan,
        hardware=found.hardware,
        choice=found.choice,
        tokenizer=tokenizer,
        chat=chat,
        tokenizer_digest=digest_of_tokenizer(tokenizer),
        warnings=[*warnings, *small_lines(config, dataset), *failed],
        failed=failed,
        programs={
            "chats": chat_note(config, tokenizer, chat),
            **{name: said for name, said in tried.items() if not said.startswith(FAILED)},
            **check_environments(config, chat, dataset),
        },
    )
    config.rewards.judge.check_used(judged=task.judged, gpu=task.gpu)
    return task


def prompts_of(config: Config, tokenizer: Any, facts: ModelFacts) -> Dataset:
    """The recipe's prompts, their lengths and rewards checked. Raises ConfigError."""
    return load_dataset(
        config.data,
        seed=config.run.seed,
        count_tokens=lambda prompt: prompt_tokens(prompt, tokenizer, facts),
        check_reward=check_spec,
        hub_answers=hub_answers,
    )


def prompt_tokens(prompt: Prompt, tokenizer: Any, facts: ModelFacts) -> int:
    """How long it is; 0 where an environment opens the conversation itself. Raises ConfigError."""
    if prompt.environment:
        return 0
    try:
        token_ids = render_prompt(tokenizer, prompt).token_ids
    except (TemplateError, TypeError, ValueError) as error:
        raise ConfigError(
            f"prompt {prompt.prompt_id}: cannot be written by {name_of(tokenizer)}: {error}. "
            "Change the prompt, or give another template (model.chat_template)"
        ) from error
    check_ids(token_ids, facts.vocab_size, f"prompt {prompt.prompt_id}")
    return len(token_ids)


def has_chats(config: Config) -> bool:
    """Whether the chat template has any prompt to write."""
    return any(not source.raw for source in config.data.sources)


def require_prompts(config: Config) -> None:
    """Raises ConfigError for a recipe of supervised fine-tuning alone."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources: there is none, so nothing to sample; sft.sources are for `keel sft` and "
            "`keel pretrain`"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A recipe's model, on the hardware that it is planned for."""

    tokenizer: Any
    facts: ModelFacts
    hardware: Hardware
    choice: Choice
    """Of what the recipe leaves open, with the plan."""
    before: SavedChoice
    lacking: str
    """Of the model's weights here."""


def found_model(
    config: Config,
    left: frozenset[str],
    hardware: Callable[[Config], Hardware],
    *,
    chats: bool = True,
) -> Found:
    """left: knobs to be decided. chats: whether the tokenizer has to write any. Raises
    ConfigError."""
    machine = hardware(config)
    config = with_dtype(config, left, gpu=machine.gpu)
    if machine.found:
        cure = f"export it again, or remove {MANIFEST} there if it was changed on purpose"
        check_exported(Path(config.model.path), cure)
    if config.model.path == TINY_MODEL:
        check_residual(config, config.model.tiny.family)
        tokenizer = build_tokenizer(config.model.tiny.phrases)
        facts = facts_of(model_config(config.model.tiny, tokenizer))
    else:
        name = config.model.tokenizer or config.model.path
        model = load_model_config(config.model.path)
        tokenizer = load_tokenizer(name, chats=chats, chat_template=config.model.chat_template)
        facts = trainable_facts(config.model.path, model)
        check_engine_dtype(config, model.model_type)
        check_residual(config, model.model_type)
        if config.model.batch_invariant:
            check_invariant(model, config.model.path, gpu=machine.gpu)
        if name != config.model.path:
            check_same_family(config.model.path, tokenizer, name)
    before = load_choice(config, machine.signature)
    try:
        choice = choose(config, left, facts, machine, before.values)
    except ConfigError:
        machine = with_missing_nodes(machine, config)
        if not machine.missing:
            raise
        before = load_choice(config, machine.signature)
        choice = choose(config, left, facts, machine, before.values)
    lacking = "" if config.model.path == TINY_MODEL else missing_weights(config.model.path)
    if lacking and machine.found:
        raise ConfigError(f"model.path = {config.model.path!r}: {lacking}")
    return Found(
        tokenizer=tokenizer,
        facts=facts,
        hardware=machine,
        choice=choice,
        before=before,
        lacking=lacking,
    )


def chat_note(config: Config, tokenizer: Any, chat: TemplateChat | None) -> str:
    """What writes the conversations, and how the policy's calls are read."""
    if not has_chats(config):
        return "none: raw prompts"
    lacking = ", since the tokenizer has no chat template" if not tokenizer.chat_template else ""
    calls = f"; calls are read as in the format {chat.format.name}" if chat else ""
    where = ", inside the thinking alone" if chat and chat.tools_in_thinking else ""
    writer = "model.chat_template" if config.model.chat_template else name_of(tokenizer)
    return f"written by {writer}{lacking}{calls}{where}"


def check_rewards(config: Config, dataset: Dataset) -> dict[str, str]:
    """Source name → what became of its reference solutions; and with the name of a user's reward
    function, of one call of it. Raises ConfigError."""
    notes: dict[str, str] = {}
    settings = CodeSettings.from_knobs(asdict(config.rewards.code))
    try:
        length_rules(config)
        for source in config.data.sources:
            prompts = [
                *dataset.heldout.get(source.name, ()),
                *dataset.train.sources.get(source.name, ()),
            ]
            note = check_prompts(prompts, source.rewards, code=settings)
            if note:
                notes[source.name] = note
            tried = try_functions(prompts, source.rewards, timeout_s=config.rewards.timeout_s)
            notes |= {f"{source.name}, {name}": said for name, said in tried.items()}
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    return notes


def length_rules(config: Config) -> dict[str, LengthRule]:
    """Domain → its rule. Raises ValueError naming the domain."""
    rules: dict[str, LengthRule] = {}
    several = config.data.domains_with_environments
    for domain, length in config.data.lengths_by_domain.items():
        own = config.budget(domain)
        most = (own.max_sampled_tokens or own.window) if domain in several else own.max_tokens
        try:
            rules[domain] = LengthRule.from_knobs(asdict(length), limit=most)
        except ValueError as error:
            raise ValueError(f"domain {domain!r}: {error}") from error
    return rules


def warning_lines(config: Config, found: Found) -> list[str]:
    """What may be meant so, and most likely is not; GPUs that others use, and a choice that is no
    longer the one that the run began with."""
    path, lacking = config.model.path, found.lacking
    where = f"model.path = {path!r}: {lacking}; `keel train` needs them where it runs"
    taken = found.hardware.taken_said
    ignored = ignored_code(local_folder(path), transformers)
    unknown = found.hardware.gpu and not found.hardware.gpu_gib
    slow = slow_dtype(config, gpu=found.hardware.gpu)
    return [
        *([slow] if slow else []),
        *([taken] if taken else []),
        *([UNKNOWN_GIB] if unknown else []),
        *missing_lines(config, found.hardware),
        *([found.before.changed] if found.before.changed else []),
        *lint_recipe(config, found.facts),
        *literal_lines(config),
        *thinking_lines(config, found.tokenizer),
        *([where] if lacking else []),
        *(f"model.path = {path!r}: {line}" for line in ignored),
        *crowded(config, found.choice.plan, 0 if found.hardware.gpu else memory_gib()),
    ]


def thinking_lines(config: Config, tokenizer: Any) -> Iterator[str]:
    """Warn about sources that ask for thinking in other marks than the model's, or in none."""
    marks = marks_of(tokenizer, config.model.thinking_marks)
    if config.endpoint.base_url:
        return
    for source in config.data.sources:
        if not source.thinking or source.raw:
            continue
        words = system_prompt(source.system_template) + source.system + source.template
        asks = THINK.open in words
        knob = f"data.sources[{source.name}]"
        if marks is None and not asks:
            yield (
                f"{knob}.thinking: true, but neither the chat template nor the tokenizer has "
                f"thinking marks. A completion without {THINK.open} and {THINK.close} counts as "
                "answer from its first word, and its part `format` is 0. Set thinking: false, have "
                "the policy asked for these marks (system_template: reasoning), or name the "
                "model's own (model.thinking_marks)"
            )
        elif marks is not None and marks != THINK and asks:
            yield (
                f"{knob} asks the policy to think between {THINK.open} and {THINK.close}, but the "
                f"model does between {marks.open} and {marks.close}. Ask for these, or set "
                "model.thinking_marks: ['<think>', '</think>']"
            )


def missing_lines(config: Config, hardware: Hardware) -> Iterator[str]:
    """What a start does where some of the nodes that it is planned on are not there."""
    if hardware.missing:
        trainer = config.trainer
        yield (
            f"{hardware.missing}. The run starts with fewer ranks, {trainer.min_ranks} of "
            f"{trainer.ranks} at least (trainer.min_ranks); on a cluster it first waits for nodes, "
            f"{config.run.elastic_wait_s:g} s (run.elastic_wait_s)"
        )


def crowded(config: Config, plan: Plan, machine_gib: float) -> Iterator[str]:
    """Engines and ranks that together want more than a machine without a GPU has; 0: not known."""
    engines, ranks = config.rollout.engines, config.trainer.ranks
    wanted = (engines * plan.engine.total + ranks * plan.trainer.total) / GIB
    if machine_gib and wanted > machine_gib and not os.environ.get("RAY_ADDRESS"):
        yield (
            f"rollout.engines = {engines}, trainer.ranks = {ranks}: together they want "
            f"{wanted:.0f} GiB by the plan, and this machine has {machine_gib:.0f}; lower them"
        )
