"""Turn a recipe into a checked task with a model, a plan and data, before any process starts.

Only this module and `keel.trainer.launch` combine data, rewards and rollouts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from jinja2 import TemplateError
from transformers.utils.logging import disable_progress_bar

from keel.configs.load import load_recipe
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.model import TINY_MODEL
from keel.configs.system_prompts import system_prompt
from keel.data.conversations.forms import Example, Render
from keel.data.conversations.load import load_sft_data
from keel.data.conversations.text import Encoded
from keel.data.dataset import Dataset, load_dataset, source_lines, source_warnings
from keel.model.batch_invariant.layers import check_invariant
from keel.model.hub import ignored_code, local_folder, missing_weights
from keel.model.load import (
    ModelFacts,
    digest_of_tokenizer,
    facts_of,
    load_model_config,
    load_tokenizer,
)
from keel.model.tiny.build import model_config
from keel.model.tiny.cold_start import TAUGHT, taught_sources
from keel.model.tiny.tokenizer import build_tokenizer
from keel.model.trainable import (
    check_adapters,
    check_ids,
    check_same_family,
    lacks_indexers,
    trainable_facts,
)
from keel.rewards.checks import FAILED, check_prompts, check_spec, try_functions
from keel.rewards.compose import REFUSAL, check_weights
from keel.rewards.judge.specs import JUDGED_KINDS
from keel.rewards.length import LengthRule
from keel.rl.sft import supervised_segment
from keel.rl.turns import THINK, ToolSpec
from keel.rl.types import Prompt, Segment
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.parsing import find_thinking_marks
from keel.rollout.chat.render import Encoder, name_of, render_prompt
from keel.rollout.chat.render_given import render_given
from keel.rollout.chat.template_checks import check_prefix_preserving
from keel.trainer.build_agents import check_chat, check_environments
from keel.trainer.placement.families import (
    check_engine,
    check_indexer_length,
    check_model_type,
    stale_mask_warning,
)
from keel.trainer.placement.hardware import Hardware
from keel.trainer.placement.layouts import Choice, choose, load_choice, with_dtype
from keel.trainer.placement.nodes import detect_hardware, with_missing_nodes
from keel.trainer.placement.plan import describe, section_lines
from keel.trainer.run.checkpoint import latest_complete, read_state
from keel.trainer.run.manifest import MANIFEST, check_exported
from keel.trainer.sft import Batches

_UNKNOWN_GIB = (
    "run.gpu_gib is not set and no GPU is here, so GPUs could not be planned: open knobs have "
    "their values for a CPU. Set the memory of a GPU, for example run.gpu_gib=80"
)
DetectHardware = Callable[[Config], Hardware]


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A recipe's model, along with the plan for running it on the available hardware."""

    config: Config  # the config in which every `auto` value has been resolved
    tokenizer: Any
    tokenizer_digest: str  # the value of `keel.model.load.digest_of_tokenizer`
    facts: ModelFacts
    hardware: Hardware
    choice: Choice
    warnings: Sequence[str]

    @property
    def gpu(self) -> bool:
        return self.hardware.gpu

    def count_tokens(self, prompt: Prompt) -> int:
        """Return a prompt's length in tokens, or 0 if an environment starts the conversation.
        Raises ConfigError if the chat template can't render the prompt."""
        if prompt.environment:
            return 0
        try:
            token_ids = render_prompt(self.tokenizer, prompt)[0]
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(
                f"prompt {prompt.prompt_id}: cannot be written by {name_of(self.tokenizer)}: "
                f"{error}. Change the prompt, or give another template (model.chat_template)"
            ) from error
        check_ids(token_ids, self.facts.vocab_size, f"prompt {prompt.prompt_id}")
        return len(token_ids)


@dataclass(frozen=True, kw_only=True)
class Task(PlannedModel):
    """A validated recipe for RL or supervised training, and its data."""

    recipe: Config
    """The complete recipe. In RL, it is the config that `prepare` resolved. In supervised training,
    its `auto` values are unresolved, and `config` holds only the knobs that matter."""
    dataset: Dataset
    """The prompts of `data.sources`. Supervised training only excludes those held out."""
    batches: Batches | None  # conversations or texts for supervised training, or None in RL
    chat: TemplateChat | None  # the model's chat format, or None if no source has an environment
    data_lines: Sequence[str]  # a description of the data and the results of checking rewards
    failed: Sequence[str] = ()  # warnings about reward functions that failed on a completion

    @property
    def command(self) -> str:
        if self.batches is None:
            return "train"
        return "pretrain" if self.config.sft.only_text else "sft"

    @property
    def judged(self) -> bool:
        return needs_judge(self.config, self.dataset)

    def restore(self, position: Mapping[str, Any]) -> None:
        (self.batches or self.dataset.train).restore(position)

    def position(self) -> Mapping[str, Any]:
        return (self.batches or self.dataset.train).position()

    def text(self, *, placed: bool = False, trains: bool = True) -> str:
        """Describe the task for the user. Set `placed` to show which GPUs each actor would get, and
        unset `trains` to leave out training steps."""
        sections = describe(
            self.config,
            self.facts,
            self.choice.plan,
            self.hardware,
            self.data_lines,
            passes=self.batches.passes(self.config.run.steps) if self.batches else 0.0,
            placed=placed,
            trains=trains,
        )
        lines = section_lines({**sections, "chosen": self.choice.lines()})
        return "\n".join([*lines, *(f"{'warning':<12} {line}" for line in self.warnings)])


def prepare(
    recipe: str,
    overrides: Sequence[str],
    *,
    supervised: bool = False,
    hardware: DetectHardware = detect_hardware,
) -> Task:
    """Load a recipe for RL or supervised training, and run every check that can run before any
    process starts. Raises ConfigError if one fails."""
    disable_progress_bar()  # the bars of transformers would break ours
    config, open_knobs = load_recipe(recipe, overrides)
    chats = any(not source.raw for source in config.data.sources)
    if supervised:
        chats = chats or not config.sft.only_text
        model = plan_model(config.supervised(), open_knobs, hardware, chats=chats)
        return _with_conversations(model, config, overrides)
    check_sources(config)
    return _with_rewards(plan_model(config, open_knobs, hardware, chats=chats))


def _with_rewards(model: PlannedModel) -> Task:
    """Load the prompts, and check their rewards and environments with this model."""
    config, tokenizer, gpu = model.config, model.tokenizer, model.gpu
    check_engine(config, model.facts, gpu=gpu, fp8=model.hardware.fp8)
    cold_start = config.model.path == TINY_MODEL and config.model.tiny.cold_start.steps
    if cold_start and not config.endpoint.base_url:
        taught_sources(config.data.sources)
    chat = check_chat(config, tokenizer)
    dataset = load_prompts(config, model.count_tokens)
    chats = "none: raw prompts"
    if not all(source.raw for source in config.data.sources):
        writer = "model.chat_template" if config.model.chat_template else name_of(tokenizer)
        chats = f"written by {writer}"
        chats += "" if tokenizer.chat_template else ", since the tokenizer has no chat template"
        if chat:
            chats += f"; calls are read as in the format {chat.format.name}"
            inside = [s.name for s in config.data.sources if config.calls_in_thinking(s)]
            chats += f", inside the thinking in {', '.join(inside)}" if inside else ""
    notes = {"chats": chats, **check_rewards(config, dataset)}
    failed = [f"{name}: {note}" for name, note in notes.items() if note.startswith(FAILED)]
    notes |= check_environments(config, chat, dataset)
    lines = [f"{name}: {note}" for name, note in notes.items()]
    warnings = [*model.warnings, *source_warnings(config, dataset), *failed]
    task = Task(
        **vars(replace(model, warnings=warnings)),
        recipe=config,
        dataset=dataset,
        batches=None,
        chat=chat,
        data_lines=[*source_lines(config, dataset), *(x for x in lines if x not in failed)],
        failed=failed,
    )
    config.rewards.judge.check_used(judged=task.judged, gpu=gpu)
    return task


# The model.


def plan_model(
    config: Config, open_knobs: frozenset[str], hardware: DetectHardware, *, chats: bool
) -> PlannedModel:
    """Load the model's config and tokenizer, and choose values for `open_knobs`. Set `chats` if a
    chat template is required. Raises ConfigError if the model can't be used."""
    machine, path = hardware(config), config.model.path
    config = with_dtype(config, open_knobs, gpu=machine.gpu)
    if machine.found:
        cure = f"export it again, or remove {MANIFEST} there if it was changed on purpose"
        check_exported(Path(path), cure)
    tokenizer, facts = _model_facts(config, gpu=machine.gpu, chats=chats)
    saved, changed = load_choice(config, machine.signature)
    try:
        choice = choose(config, open_knobs, facts, machine, saved)
    except ConfigError:
        machine = with_missing_nodes(machine, config)
        if not machine.missing:
            raise
        saved, changed = load_choice(config, machine.signature)
        choice = choose(config, open_knobs, facts, machine, saved)
    lacking = "" if path == TINY_MODEL else missing_weights(path)
    if lacking and machine.found:
        raise ConfigError(f"model.path = {path!r}: {lacking}")
    config = choice.config
    fewer = (
        f"{machine.missing}. The run starts with fewer ranks, {config.trainer.min_ranks} of "
        f"{config.trainer.ranks} at least (trainer.min_ranks), if no node joins within "
        f"{config.run.elastic_wait_s:g} s (run.elastic_wait_s)"
    )
    warnings = [
        _UNKNOWN_GIB if machine.gpu and not machine.gpu_gib else "",
        fewer if machine.missing else "",
        changed,
        stale_mask_warning(config),
        _indexers_warning(config, facts),
        *_thinking_warnings(config, tokenizer),
        lacking and f"model.path = {path!r}: {lacking}; `keel train` needs them",
        *(
            f"model.path = {path!r}: {line}"
            for line in ignored_code(local_folder(path), transformers)
        ),
    ]
    return PlannedModel(
        config=config,
        tokenizer=tokenizer,
        tokenizer_digest=digest_of_tokenizer(tokenizer),
        facts=facts,
        hardware=machine,
        choice=choice,
        warnings=[line for line in warnings if line],
    )


def _indexers_warning(config: Config, facts: ModelFacts) -> str:
    path, attention, run = config.model.path, config.trainer.attention, config.run
    dense = facts.architecture == "DeepseekV3ForCausalLM"
    if attention == "sparse" and dense and config.sft.only_text:
        return (
            f"model.path = {path!r} has no indexers, so its attention stays dense. For sparse "
            "attention, start from the model of a warm-up"
        )
    resumes = run.resume != "never" and latest_complete(run.folder / "checkpoints")
    if attention != "warm-up" or path == TINY_MODEL or resumes or not lacks_indexers(path):
        return ""
    return (
        f"model.path = {path!r} has no indexers: this warm-up starts from random ones "
        f"(run.seed = {run.seed})"
    )


def _model_facts(config: Config, *, gpu: bool, chats: bool) -> tuple[Any, ModelFacts]:
    settings = config.model
    if settings.path == TINY_MODEL:
        check_model_type(config, settings.tiny.family)
        tokenizer = build_tokenizer(settings.tiny.phrases)
        facts = facts_of(model_config(settings.tiny, tokenizer))
        check_adapters(settings.lora, facts)
    else:
        name = settings.tokenizer or settings.path
        warm_up = config.trainer.attention == "warm-up"
        model = load_model_config(settings.path, new_indexers=warm_up)
        tokenizer = load_tokenizer(name, chats=chats, chat_template=settings.chat_template)
        facts = trainable_facts(settings.path, model, new_indexers=warm_up)
        check_adapters(settings.lora, facts)
        check_model_type(config, model.model_type)
        if settings.batch_invariant:
            check_invariant(model, settings.path, dtype=settings.dtype, gpu=gpu)
        if name != settings.path:
            check_same_family(settings.path, tokenizer, f"model.tokenizer = {name!r}")
    count = active = 0
    for path in config.data.references[1:]:
        names = [source.name for source in config.data.sources if source.teacher == path]
        knob = f"data.sources[{names[0]}].teacher = {path!r}"
        try:
            teacher = trainable_facts(path, load_model_config(path))
        except ConfigError as error:
            raise ConfigError(f"{knob} cannot be used: {error}") from error
        if teacher.vocab_size < facts.vocab_size:
            raise ConfigError(
                f"{knob} has a vocabulary of {teacher.vocab_size} ids, the model "
                f"{facts.vocab_size}. A teacher must score all of the student's tokens"
            )
        check_same_family(path, tokenizer, knob)
        count, active = count + teacher.parameters, active + teacher.active_parameters
    passes = active / facts.active_parameters
    return tokenizer, replace(facts, teacher_parameters=count, teacher_passes=passes)


# Prompts and rewards.


def load_prompts(config: Config, count_tokens: Callable[[Prompt], int] = lambda _: 0) -> Dataset:
    return load_dataset(
        config.data, seed=config.run.seed, count_tokens=count_tokens, check_reward=check_spec
    )


def check_sources(config: Config) -> None:
    """Check that there are sources of prompts, and that their reward functions, reward parts and
    length rules are valid. Raises ConfigError if not."""
    if not config.data.sources:
        raise ConfigError(
            "data.sources is empty: nothing to sample. sft.sources are for `keel sft` and "
            "`keel pretrain`"
        )
    try:
        check_weights(config.data.rewards_by_domain, config.data.domains_with_environments)
        length_rules(config)
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error


def needs_judge(config: Config, dataset: Dataset) -> bool:
    if any(REFUSAL in weights for weights in config.data.rewards_by_domain.values()):
        return True
    everything = [*dataset.train.sources.values(), *dataset.heldout.values()]
    kinds = {prompt.reward.get("kind") for prompts in everything for prompt in prompts}
    return not kinds.isdisjoint(JUDGED_KINDS)


def check_rewards(config: Config, dataset: Dataset) -> dict[str, str]:
    """Score each source's reference solutions and call each custom reward function once. Returns
    notes on the results, keyed by name. Raises ConfigError if a reward is invalid."""
    notes: dict[str, str] = {}
    try:
        for source in config.data.sources:
            prompts = [
                *dataset.heldout.get(source.name, ()),
                *dataset.train.sources.get(source.name, ()),
            ]
            if note := check_prompts(prompts, source.rewards, code=config.rewards.code):
                notes[source.name] = note
            tried = try_functions(prompts, source.rewards, timeout_s=config.rewards.timeout_s)
            notes |= {f"{source.name}, {name}": note for name, note in tried.items()}
    except ValueError as error:
        raise ConfigError(f"data.sources: {error}") from error
    return notes


def length_rules(config: Config) -> dict[str, LengthRule]:
    rules: dict[str, LengthRule] = {}
    for domain, source in config.data.domains.items():
        budget = config.budget(domain)
        limit = budget.max_tokens
        if domain in config.data.domains_with_environments:
            limit = budget.max_sampled_tokens or budget.window
        try:
            rules[domain] = LengthRule.from_knobs(source.length, limit=limit)
        except ValueError as error:
            raise ValueError(f"domain {domain!r}: {error}") from error
    return rules


def _thinking_warnings(config: Config, tokenizer: Any) -> Iterator[str]:
    if config.endpoint.base_url:
        return
    marks = find_thinking_marks(tokenizer, config.model.thinking_marks)
    for source in config.data.sources:
        if not source.thinking or source.raw:
            continue
        words = system_prompt(source.system_template) + source.system + source.template
        asks, knob = THINK.open in words, f"data.sources[{source.name}]"
        if marks is None and not asks:
            yield (
                f"{knob}.thinking: true, but neither the chat template nor the tokenizer has "
                "thinking marks, so the whole completion counts as the answer. Set thinking: "
                "false, ask for marks (system_template: reasoning), or set model.thinking_marks"
            )
        elif marks is not None and marks != THINK and asks:
            yield (
                f"{knob} asks the policy to think between {THINK.open} and {THINK.close}, but the "
                f"model does between {marks.open} and {marks.close}. Ask for these, or set "
                "model.thinking_marks: ['<think>', '</think>']"
            )


# Conversations and texts.


def _with_conversations(model: PlannedModel, recipe: Config, overrides: Sequence[str]) -> Task:
    """Load the conversations and texts, tokenized for this model, without the prompts that
    `recipe` holds out."""
    config, sft, facts, tokenizer = model.config, model.config.sft, model.facts, model.tokenizer
    if facts.balance_loss:
        raise ConfigError(
            f"model.path = {config.model.path!r}: config.json asks for a loss that balances "
            "experts, which supervised training does not add (docs/sft.md). Set "
            "output_router_logits: false in a copy of the folder"
        )
    dataset = load_prompts(recipe, model.count_tokens)
    try:
        chat = None if sft.only_text else TemplateChat(tokenizer, marks=config.model.thinking_marks)
        texts = any(source.is_text for source in sft.sources)
        encoded = _text_encoder(tokenizer) if texts else None
    except ValueError as error:
        name = config.model.tokenizer or config.model.path
        raise ConfigError(f"the tokenizer of {name!r}: {error}") from error
    data = load_sft_data(
        sft,
        seed=config.run.seed,
        render=_chat_renderer(chat),
        solve=_solve_with_reasoning,
        tokenizer=model.tokenizer_digest,
        encoded=encoded,
        reserved=dataset.reserved,
        reserved_ids={p.prompt_id for prompts in dataset.heldout.values() for p in prompts},
    )
    for example in chain(*data.train.sources.values(), *data.heldout.values()):
        for segment in example.segments:
            check_ids(segment.token_ids_T, facts.vocab_size, segment.prompt_id)
    epoch = sum(source.repeat * data.report[source.name].learned for source in sft.sources)
    batches = Batches(data.train, sft, epoch=epoch, heldout=data.heldout)
    if sft.only_text:
        longest = max(report.longest for report in data.report.values())
        check_indexer_length(config, facts, longest=longest)
    warnings = [*model.warnings]
    if sft.epochs:
        config = replace(config, run=replace(config.run, steps=_total_steps(config, batches)))
        if any(each.startswith("run.steps=") for each in overrides):
            warnings.append("run.steps is ignored because sft.epochs is set; sft.epochs=0 uses it")
    lines = [line for name, report in data.report.items() for line in report.lines(name)]
    if chat:
        lines.append(f"chats are written in the format {chat.format.name}")
    return Task(
        **vars(replace(model, config=config, warnings=warnings)),
        recipe=recipe,
        dataset=dataset,
        batches=batches,
        chat=None,
        data_lines=lines,
    )


def _total_steps(config: Config, batches: Batches) -> int:
    """Return the step at which the last of `sft.epochs` epochs is complete. Steps before the newest
    checkpoint are counted rather than estimated, because the last batch of an earlier epoch may
    have been smaller."""
    beginning, done = batches.position(), 0
    if newest := latest_complete(config.run.folder / "checkpoints"):
        with suppress(ValueError, LookupError, TypeError):  # resuming reports it
            state = read_state(newest)
            batches.restore(state.cursor)
            done = state.step
    steps = done + batches.steps_of(config.sft.epochs)
    batches.restore(beginning)
    return steps


def _text_encoder(tokenizer: Any) -> Encoded:
    """Return a function that encodes text with the tokenizer's prefix and end-of-text token,
    escaping control tokens. Raises ValueError if the tokenizer doesn't support this."""
    encoder, end = Encoder(tokenizer), tokenizer.eos_token_id
    before = [index for index in tokenizer("")["input_ids"] if index != end]
    return Encoded(lambda text: encoder.encode(encoder.shield(text)), tuple(before), (end,))


def _chat_renderer(chat: TemplateChat | None) -> Render:
    """Return a function that renders conversations to token ids using the same code as rollouts."""
    checked: set[tuple[bool, bool]] = set()

    def render(example: Example) -> list[Segment]:
        assert chat is not None
        tools = [
            ToolSpec(name=f["name"], description=str(f["description"]), parameters=f["parameters"])
            for f in (tool["function"] for tool in example.tools)
        ]
        kind = (example.thinking, bool(tools))
        if len(example.trained) > 1 and kind not in checked:
            check = check_prefix_preserving if tools else partial(check_prefix_preserving, tools=())
            check(chat, modes=(example.thinking,))
            checked.add(kind)
        contexts = render_given(
            chat, example.messages, tools, thinking=example.thinking, trained=example.trained
        )
        return [
            supervised_segment(example.origin, context.ids, context.trained) for context in contexts
        ]

    return render


def _solve_with_reasoning(task: str, entry: Mapping[str, Any]) -> dict[str, Any] | None:
    if (solution := TAUGHT.get(task)) is None or not solution.covers(entry["metadata"]):
        return None
    working = solution.working(entry["metadata"])
    return {"role": "assistant", "content": str(entry["answer"]), "reasoning_content": working}
