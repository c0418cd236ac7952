"""Turn a recipe for supervised training into a checked task with a model, a plan and conversations,
before any process starts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from transformers.utils.logging import disable_progress_bar

from keel.configs.load import load_config, load_recipe
from keel.configs.schema import Config, ConfigError
from keel.configs.sections.sft import TEXT
from keel.data.conversations.forms import Example, Render
from keel.data.conversations.load import SftData, load_sft_data
from keel.data.conversations.text import Encoded
from keel.data.dataset import Dataset
from keel.model.tiny.cold_start import TAUGHT
from keel.model.trainable import check_ids
from keel.rl.sft import supervised_segment
from keel.rl.turns import ToolSpec
from keel.rl.types import Segment
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.render import Encoder
from keel.rollout.chat.render_given import render_given
from keel.rollout.chat.template_checks import check_prefix_preserving
from keel.trainer.placement.families import check_indexer_length
from keel.trainer.placement.nodes import detect_hardware
from keel.trainer.placement.plan import model_line, ranks_line
from keel.trainer.placement.step_time import seconds, sft_seconds
from keel.trainer.prepare import DetectHardware, PlannedModel, load_prompts, plan_model
from keel.trainer.run.checkpoint import latest_complete, read_state
from keel.trainer.sft import Batches

_ATTENTION = {
    "warm-up": "dense; the indexers alone are trained, by Eq. 3",
    "dense": "dense; everything but the indexers is trained",
    "sparse": "sparse; the indexers are trained by Eq. 4 alone, the rest by the model's loss",
}


@dataclass(frozen=True, kw_only=True)
class SftTask(PlannedModel):
    """A validated recipe for supervised training, along with its conversations or texts."""

    data: SftData
    batches: Batches
    recipe: Config
    """The complete recipe. `config` contains only what affects supervised training."""
    prompts: Dataset | None
    """Prompts from `data.sources`, whose held-out sets are excluded from training."""
    format: str  # the name of the chat format, or an empty string if there are no chats

    @property
    def command(self) -> str:
        return "pretrain" if self.config.sft.only_text else "sft"

    def restore(self, position: Mapping[str, Any]) -> None:
        self.batches.restore(position)

    def position(self) -> Mapping[str, Any]:
        return self.batches.position()

    def text(self, *, seats: Sequence[str] = ()) -> str:
        config, sft, trainer = self.config, self.config.sft, self.config.trainer
        what = "windows" if sft.only_text else "conversations"
        size = f"{sft.conversations_per_step} {what}"
        if sft.tokens_per_step:
            size = f"{what} of at most {sft.tokens_per_step:,} tokens together"
        seen = self.batches.passes(config.run.steps)
        passes = f", {seen:.3g} passes over the data" if seen else ""
        passes += " (sft.epochs, and not run.steps)" if sft.epochs else ""
        batch = f"{size} a step, in micro-batches of {trainer.micro_batch_tokens:,} tokens"
        reports = self.data.report.items()
        data = [line for name, report in reports for line in report.lines(name)]
        if self.format:
            data.append(f"chats are written in the format {self.format}")
        attention = [_ATTENTION[trainer.attention]] if self.facts.index_top_k else []
        time: list[str] = []
        if self.gpu:
            spec = self.hardware.spec
            step = sft_seconds(config, self.facts, spec)
            hours = config.run.steps * step / 3600
            time = [
                f"ESTIMATE, not measured, for {spec.name} and {what} of full length: "
                f"{seconds(step)} per step, {hours:,.1f} hours for {config.run.steps:,} steps"
            ]
        return self._text(
            {
                "model": [model_line(config, self.facts)],
                "data": data,
                "batch": [f"{batch}; the loss is a mean over {sft.mean}"],
                "attention": attention,
                "steps": [f"{config.run.steps}{passes}; lr {trainer.lr:g} ({trainer.schedule})"],
                "actors": [ranks_line(config, gpu=self.gpu)],
                "hardware": [str(self.hardware) if self.gpu else "on CPU"],
                "placement": seats,
                "memory": [f"trainer rank: {self.plan.trainer}"],
                "time": time,
                "run folder": [config.run.dir],
            }
        )


def prepare_sft(
    recipe: str, overrides: Sequence[str], *, hardware: DetectHardware = detect_hardware
) -> SftTask:
    """Load a recipe for supervised training and run every check that can run before the ranks
    start. Raises ConfigError if one fails."""
    disable_progress_bar()
    whole, open_knobs = load_recipe(recipe, overrides)
    if not whole.sft.sources:
        raise ConfigError("sft.sources is empty; add a source (docs/sft.md, docs/pretrain.md)")
    config, only_text = whole.supervised(whole.run.steps), whole.sft.only_text
    chats = not only_text or any(not source.raw for source in whole.data.sources)
    model = plan_model(config, open_knobs, hardware, chats=chats)
    config, tokenizer, facts = model.config, model.tokenizer, model.facts
    if facts.balance_loss:
        raise ConfigError(
            f"model.path = {config.model.path!r}: config.json asks for a loss that balances "
            "experts, which supervised training does not add (docs/sft.md). Set "
            "output_router_logits: false in a copy of the folder"
        )
    prompts = load_prompts(whole, tokenizer, facts) if whole.data.sources else None
    try:
        chat = TemplateChat(tokenizer, marks=config.model.thinking_marks) if chats else None
        texts = any(source.is_text for source in config.sft.sources)
        encoded = _text_encoder(tokenizer) if texts else None
    except ValueError as error:
        name = config.model.tokenizer or config.model.path
        raise ConfigError(f"the tokenizer of {name!r}: {error}") from error
    heldout = prompts.heldout.values() if prompts else ()
    data = load_sft_data(
        config.sft,
        seed=config.run.seed,
        render=_chat_renderer(chat),
        solve=_solve_with_reasoning,
        tokenizer=model.tokenizer_digest,
        encoded=encoded,
        reserved=set(prompts.reserved) if prompts else set(),
        reserved_ids={prompt.prompt_id for each in heldout for prompt in each},
    )
    for example in chain(*data.train.sources.values(), *data.heldout.values()):
        for segment in example.segments:
            check_ids(segment.token_ids_T, facts.vocab_size, segment.prompt_id)
    epoch = sum(s.repeat * data.report[s.name].learned for s in config.sft.sources)
    batches = Batches(data.train, config.sft, epoch=epoch)
    if config.sft.epochs:
        config = replace(config, run=replace(config.run, steps=_total_steps(config, batches)))
    if only_text:
        longest = max(report.longest for report in data.report.values())
        check_indexer_length(config, facts, longest=longest)
    warnings = [*model.warnings]
    if config.sft.epochs and any(each.startswith("run.steps=") for each in overrides):
        warnings.append("run.steps is ignored because sft.epochs is set; sft.epochs=0 uses it")
    return SftTask(
        **vars(replace(model, config=config, warnings=warnings)),
        data=data,
        batches=batches,
        recipe=whole,
        prompts=prompts,
        format=chat.format.name if chat and not only_text else "",
    )


def prepare_pretraining(recipe: str, overrides: Sequence[str]) -> SftTask:
    """Load and check a recipe that trains on text only. Raises ConfigError if a check fails."""
    sources = load_config(recipe, overrides).sft.sources
    if others := [source.name for source in sources if not source.is_text]:
        raise ConfigError(
            f"sft.sources: {', '.join(others)}: no text. `keel pretrain` learns from source: "
            f"{' and '.join(TEXT)}, and `keel sft` from conversations, too"
        )
    return prepare_sft(recipe, overrides)


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
