"""Supervised warm-up of the tiny model: the answer format, and a little skill.

The teacher has two habits. At first it works every question out, and the model learns to do the
same. Then it grows hasty: for a share of the questions it skips the working and answers wrongly.
The model picks up both habits in the teacher's proportion, so whatever the seed it starts
reinforcement learning right in a little less than the worked share of its answers. What is left to
find is that working a question out pays, and, more slowly, how to slip less often on the way.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from keel.configs.schema import ColdStartConfig, ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.model.tiny.conversations import Demonstration, conversation_ids, demonstrated
from keel.model.tiny.solutions import solution
from keel.model.tiny.tokenizer import TURN_END
from keel.rl.turns import Message

DATA_SEED = 1 << 40
"""Added to the seed of the questions, far from any seed that a recipe gives its prompts."""
SEED_STRIDE = 16384
"""From one run seed's questions to the next one's, or more where a source has more of them."""
LOW_SEEDS = frozenset({"pool_matrix"})
"""Tasks that draw with NumPy, whose seeds end at 2**32."""
CAREFUL = 0.7
"""Share of the steps in which every solution is worked, before the hasty ones come in."""
WARMUP = 0.1
"""Share of the steps over which the learning rate rises; it then falls to zero as a cosine."""
IGNORED = -100
_MARKER = "\x00"

Demonstrate = Callable[[str, int], Sequence[Demonstration]]
"""About so many conversations of the source of that name."""
Progress = Callable[[int, float, float], None]
"""Called after each step with the steps done, the loss (nats a token) and the seconds so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """What is taught. How, the recipe's `ColdStartConfig` says."""

    seed: int
    """Of the weights to begin with, too."""
    sources: Sequence[SourceConfig] = ()
    heldout_questions: Collection[str] = ()
    """None of them is trained on."""
    demonstrate: Demonstrate | None = None
    """Of sources with environments; goes into another process if the model is taught on a GPU."""
    tools_in_thinking: bool = False
    """Where these call tools (`conversation_ids`)."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """Token ids, and which of them the model is to say."""

    ids: Sequence[int]
    said: Sequence[bool]


@dataclass(frozen=True, slots=True)
class Example:
    """A task done both ways. They are equal where the task is not taught."""

    worked: Lesson
    hasty: Lesson


NOTHING = (
    "data.sources: the tiny model learns from reasoning_gym tasks that have an answer to show, "
    "and from demonstrations of environments (data.sources[].environment.demonstrations), and none "
    "is given. Add one, set model.tiny.cold_start.steps: 0 to begin with one that knows "
    "nothing, or name a model (model.path)"
)


def taught_sources(
    sources: Sequence[SourceConfig], *, demonstrating: bool = True
) -> list[SourceConfig]:
    """Those that there is something to teach of. demonstrating: environments can be worked in.
    Raises ConfigError where none is."""
    taught = [
        source
        for source in sources
        if source.weight > 0
        and (source.source == "reasoning_gym" or (demonstrating and demonstrated(source)))
    ]
    if not taught:
        raise ConfigError(NOTHING)
    return taught


def system_of(source: SourceConfig) -> str:
    """The system message of its questions, as in rollouts; empty: none. A template for an
    environment waits for its tools."""
    template = "none" if source.environment.given else source.system_template
    messages = with_system(system_prompt(template), with_system(source.system, ()))
    return "".join(message["content"] for message in messages)  # one or none


def make_examples(
    curriculum: Curriculum,
    tokenizer: PreTrainedTokenizerFast,
    *,
    count: int,
    max_context: int | None = None,
) -> list[Example]:
    """About `count` questions of the reasoning_gym sources and conversations of the sources that
    `demonstrate` has some of, by weight. max_context: tokens that the model holds; None: no limit.

    Raises:
        ConfigError: nothing to learn from, every question of a source is held out, or no
            conversation of one is made, or one that cannot be shown to the model.
    """
    demonstrate = curriculum.demonstrate
    taught = taught_sources(curriculum.sources, demonstrating=demonstrate is not None)
    heldout = frozenset(curriculum.heldout_questions)
    total = sum(source.weight for source in taught)
    examples: list[Example] = []
    for source in taught:
        share = math.ceil(count * source.weight / total)
        if demonstrate is not None and demonstrated(source):
            lesson = partial(
                conversation_ids,
                tokenizer,
                thinking=source.thinking,
                tools_in_thinking=curriculum.tools_in_thinking,
            )
            shown = demonstrate(source.name, share)
            examples += _shown_examples(source, shown, lesson, max_context)
        else:
            examples += _source_examples(source, tokenizer, curriculum.seed, heldout, share)
    if not examples:
        raise ConfigError(NOTHING)
    return examples


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[Example],
    config: ColdStartConfig,
    *,
    seed: int,
    progress: Progress | None = None,
) -> float:
    """Train `model` in place with AdamW on `config.steps` batches; returns the last loss.

    Only the solution's tokens are learned, never the question's. On a CPU the same arguments give
    the same weights on one kind of machine, bit for bit; on a GPU, see
    `keel.model.tiny.on_gpu`.

    Raises:
        TimeoutError: after `config.max_seconds`. A model cut short would not be the one that the
            configuration describes.
    """
    # The default loops over the experts; this makes one call of them all.
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    start, value = time.monotonic(), math.nan
    model.train()
    with _one_thread(), _dense(model):
        for step, (inputs, targets) in enumerate(
            _batches(examples, tokenizer, config, random.Random(seed))
        ):
            for group in optimizer.param_groups:
                group["lr"] = config.lr * _schedule(step, config.steps)
            logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1), targets.to(model.device).flatten(), ignore_index=IGNORED
            )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            value, seconds = float(loss.detach()), time.monotonic() - start
            if progress is not None:
                progress(step + 1, value, seconds)
            if seconds > config.max_seconds and step + 1 < config.steps:
                raise TimeoutError(
                    f"model.tiny.cold_start.max_seconds = {config.max_seconds:g}: {step + 1} "
                    f"of {config.steps} steps took {seconds:.0f} s. Raise it, or lower "
                    "model.tiny.cold_start.steps (the model will know less)"
                )
    model.eval()
    return value


@contextmanager
def _one_thread() -> Iterator[None]:
    """GEMMs this small gain nothing from a second core, lose much on a busy one, and sum in an
    order that depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _dense(model: PreTrainedModel) -> Iterator[None]:
    """Attention to all earlier tokens: an indexer knows nothing yet of what to select."""
    own: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
    kept = [indexer.index_topk for indexer in own]
    for indexer in own:
        indexer.index_topk = model.config.max_position_embeddings
    try:
        yield
    finally:
        for indexer, top_k in zip(own, kept, strict=True):
            indexer.index_topk = top_k


def _shown_examples(
    source: SourceConfig,
    shown: Sequence[Demonstration],
    lesson: Callable[..., tuple[list[int], list[bool]]],
    max_context: int | None,
) -> list[Example]:
    """lesson: ids of a conversation, and which of them are said. Raises ConfigError."""
    at = (
        f"data.sources[{source.name}].environment.demonstrations = "
        f"{source.environment.demonstrations!r}"
    )
    if not shown:
        raise ConfigError(f"{at}: it made no conversation")
    examples: list[Example] = []
    for number, one in enumerate(shown):
        both: list[Lesson] = []
        for name, messages in (("worked", one.worked), ("hasty", one.hasty)):
            try:
                _check_calls(messages, [tool.name for tool in one.tools])
                taught = Lesson(*lesson(messages, one.tools))
                if len(taught.ids) > (max_context or math.inf):
                    raise ValueError(
                        f"it has {len(taught.ids)} tokens, and model.tiny.max_context = "
                        f"{max_context}"
                    )
            # Whatever a template makes of messages that have another form.
            except (LookupError, TypeError, AttributeError, ValueError, TemplateError) as error:
                raise ConfigError(
                    f"{at}: `{name}` of conversation {number}: {type(error).__name__}: {error}"
                ) from error
            both.append(taught)
        examples.append(Example(*both))
    return examples


def _check_calls(messages: Sequence[Message], tools: Sequence[str]) -> None:
    for message in messages:
        for call in message.get("tool_calls") or ():
            if (name := call["function"]["name"]) not in tools:
                raise ValueError(f"it calls {name!r}, and the tools are {', '.join(tools)}")


def _source_examples(
    source: SourceConfig,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    heldout: frozenset[str],
    count: int,
) -> list[Example]:
    """None of a task whose questions come without an answer, such as those about a plan."""
    # Importing it takes a second and builds a hundred tasks: only who makes examples pays.
    import reasoning_gym  # noqa: PLC0415

    # reasoning_gym seeds entry i with seed + i: seeds at least a count apart share no entry.
    first = seed * max(SEED_STRIDE, count)
    first = 2**31 + first % 2**30 if source.task in LOW_SEEDS else DATA_SEED + first
    params = {**source.params, "seed": first, "size": count}
    made = reasoning_gym.create_dataset(source.task, **params)
    answered = [entry for entry in made if entry["answer"] is not None]
    if not answered:
        return []
    entries = [entry for entry in answered if entry["question"] not in heldout]
    if not entries:
        raise ConfigError(
            f"data.sources[{source.name}]: every question made for the cold start is held out. "
            "Widen the task (params), or hold out fewer prompts"
        )
    # The template is rendered once, around a marker; the questions are put in its place.
    system = [{"role": "system", "content": text}] if (text := system_of(source)) else []
    template = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": _MARKER}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=source.thinking,
    )
    assert isinstance(template, str)
    before, after = template.split(_MARKER)
    prompts = _encode(tokenizer, [f"{before}{entry['question']}{after}" for entry in entries])
    if not source.thinking:
        # The template has closed the think block already: only the answer is left to say.
        worked = hasty = _encode(tokenizer, [f"{e['answer']}{TURN_END}" for e in entries])
    else:
        worked, hasty = (
            _encode(
                tokenizer,
                [solution(source.task, entry, worked=shown) + TURN_END for entry in entries],
            )
            for shown in (True, False)
        )
    return [
        Example(_lesson(prompt, careful), _lesson(prompt, quick))
        for prompt, careful, quick in zip(prompts, worked, hasty, strict=True)
    ]


def _lesson(prompt: tuple[int, ...], answer: tuple[int, ...]) -> Lesson:
    return Lesson(prompt + answer, (False,) * len(prompt) + (True,) * len(answer))


def _encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[tuple[int, ...]]:
    return [tuple(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]


def _batches(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerFast,
    config: ColdStartConfig,
    rng: random.Random,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets of each step, [B, T] int64. Padding is on the right and ignored."""
    order: list[int] = []
    for step in range(config.steps):
        careful = step < CAREFUL * config.steps
        while len(order) < config.batch_size:
            epoch = list(range(len(examples)))
            rng.shuffle(epoch)
            order += epoch
        chosen, order = order[: config.batch_size], order[config.batch_size :]
        rows = [
            example.worked if show else example.hasty
            for example, show in (
                (examples[index], careful or rng.random() < config.worked_fraction)
                for index in chosen
            )
        ]
        longest = max(len(lesson.ids) for lesson in rows)
        tokens = np.full((len(rows), longest), tokenizer.pad_token_id, np.int64)
        targets = np.full((len(rows), longest), IGNORED, np.int64)
        for row, lesson in enumerate(rows):
            ids = np.array(lesson.ids)
            tokens[row, : len(ids)] = ids
            targets[row, : len(ids) - 1] = np.where(lesson.said[1:], ids[1:], IGNORED)
        yield torch.from_numpy(tokens), torch.from_numpy(targets)


def _schedule(step: int, steps: int) -> float:
    warmup = max(1, round(steps * WARMUP))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
