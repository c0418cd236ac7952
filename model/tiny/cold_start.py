"""Supervised warm-up for the tiny model, which teaches it the answer format and some skill. The
examples are questions of reasoning_gym with taught solutions, and scripted conversations
(`data.sources[].environment.demonstrations`).

At first, the teacher works out every question step by step. Later, it answers a fraction of the
questions hastily: it skips the steps and gives a wrong answer. The model picks up both habits in
the same proportion. Whatever the seed, it starts reinforcement learning with slightly fewer correct
answers than the teacher's fraction of worked-out questions, and can improve by always working out
the question.
"""

import math
import random
import re
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from keel.configs.schema import ColdStartConfig, Config, ConfigError, SourceConfig
from keel.configs.system_prompts import system_prompt, with_system
from keel.model.tiny.tokenizer import THINK_END, THINK_START, TURN_END
from keel.rl.futures import on_thread
from keel.rl.turns import Message, ToolSpec

_DATA_SEED = 1 << 40
"""Offset of the question seeds, which keeps them far from the seeds of a recipe's prompts."""
_SEED_STRIDE = 16384
"""Minimum distance between the question seeds for consecutive run seeds."""
_NUMPY_SEEDED = frozenset({"pool_matrix"})
"""Tasks that use NumPy's random numbers. Their seeds must be below 2**32."""
_WORKED_ONLY = 0.7
"""Fraction of steps before hasty solutions are added."""
_WARMUP = 0.1
"""Fraction of steps during which the learning rate rises. Afterwards, it decays along a cosine."""
_IGNORED = -100
_MARKER = "\x00"


class _ScriptedPair(Protocol):
    """An environment task with two scripted solutions, one careful and one hasty."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...
    @property
    def worked(self) -> Sequence[Message]: ...
    @property
    def hasty(self) -> Sequence[Message]: ...


_Metadata = Mapping[str, Any]
Progress = Callable[[int, float, float], None]
"""Called after each step with the number of steps, the loss in nats per token, and the seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """The tasks taught during the cold start. Its hyperparameters are in `ColdStartConfig`."""

    seed: int
    sources: Sequence[SourceConfig] = ()
    heldout_questions: Set[str] = frozenset()
    demonstrate: Callable[[str, int], Sequence[_ScriptedPair]] | None = None
    """Returns scripted conversations. It must be picklable for training on a GPU."""
    tools_in_thinking: Collection[str] = ()
    """Sources whose tool calls are placed inside the thinking (see `_conversation_ids`)."""


class _MaskedIds(NamedTuple):
    ids: Sequence[int]
    learned: Sequence[bool]


class _ExamplePair(NamedTuple):
    """A careful and a hasty solution to the same task. They are equal if the task has no hasty
    solutions."""

    worked: _MaskedIds
    hasty: _MaskedIds


_NOTHING = (
    "data.sources: the tiny model has nothing to learn from. Add a reasoning_gym task with an "
    "answer or an environment with demonstrations (data.sources[].environment.demonstrations), set "
    "model.tiny.cold_start.steps: 0 to start untrained, or set model.path"
)


def taught_sources(sources: Sequence[SourceConfig]) -> list[SourceConfig]:
    """Return the sources that provide training conversations. Raises ConfigError if there are
    none."""
    taught = [
        one
        for one in sources
        if one.weight > 0 and (one.source == "reasoning_gym" or one.environment.demonstrations)
    ]
    if not taught:
        raise ConfigError(_NOTHING)
    return taught


def system_of(source: SourceConfig) -> str:
    """Return the system message that rollouts use for a source's questions, or "" if there is none.
    Environment templates are skipped, because they need the tools."""
    template = "none" if source.environment.enabled else source.system_template
    messages = with_system(system_prompt(template), with_system(source.system, ()))
    return "".join(message["content"] for message in messages)  # at most one


def make_examples(
    curriculum: Curriculum,
    tokenizer: PreTrainedTokenizerFast,
    *,
    count: int,
    max_context: int | None = None,
) -> list[_ExamplePair]:
    """Make about `count` examples from questions and scripted conversations, in proportion to the
    source weights. Raises ConfigError if there is nothing to learn, if every question from a source
    is held out, or if a script's conversations are unusable."""
    taught = taught_sources(curriculum.sources)
    total = sum(source.weight for source in taught)
    examples: list[_ExamplePair] = []
    for source in taught:
        share = math.ceil(count * source.weight / total)
        if source.environment.demonstrations:
            assert curriculum.demonstrate is not None
            pairs = curriculum.demonstrate(source.name, share)
            inside = source.name in curriculum.tools_in_thinking
            examples += _scripted_examples(source, pairs, tokenizer, inside, max_context)
        else:
            examples += _question_examples(source, tokenizer, curriculum, share)
    if not examples:
        raise ConfigError(_NOTHING)
    return examples


def train(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    examples: Sequence[_ExamplePair],
    config: ColdStartConfig,
    *,
    seed: int,
    progress: Progress | None = None,
) -> float:
    """Train `model` in place with AdamW for `config.steps` batches and return the last loss. Only
    solution tokens are trained on. The same arguments give bit-identical weights on the same kind
    of CPU. Raises TimeoutError after `config.max_seconds`, because a partly trained model would not
    match its config."""
    # One call for all experts, instead of the default loop.
    model.set_experts_implementation("grouped_mm")
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=config.lr, betas=(0.9, 0.98), weight_decay=0.01
    )
    start, value = time.monotonic(), math.nan
    warmup = max(1, round(config.steps * _WARMUP))
    decay = max(1, config.steps - warmup)
    model.train()
    with _reproducible_training(model):
        for step, (inputs, targets) in enumerate(
            _batches(examples, tokenizer, config, random.Random(seed))
        ):
            rising, done = (step + 1) / warmup, math.pi * (step - warmup) / decay
            share = rising if step < warmup else 0.5 * (1 + math.cos(done))
            optimizer.param_groups[0]["lr"] = config.lr * share
            logits = model(input_ids=inputs.to(model.device), use_cache=False).logits
            loss = functional.cross_entropy(
                logits.flatten(0, 1), targets.to(model.device).flatten(), ignore_index=_IGNORED
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
                    "model.tiny.cold_start.steps"
                )
    model.eval()
    return value


@contextmanager
def _reproducible_training(model: PreTrainedModel) -> Iterator[None]:
    """Make training reproducible inside this context. It runs on a single thread, because rounding
    depends on the number of threads. Tokens attend to all earlier tokens, because the indexer is
    not trained yet."""
    threads = torch.get_num_threads()
    indexers: list[Any] = [module for module in model.modules() if hasattr(module, "index_topk")]
    saved = [indexer.index_topk for indexer in indexers]
    torch.set_num_threads(1)
    for indexer in indexers:
        indexer.index_topk = model.config.max_position_embeddings
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for indexer, top_k in zip(indexers, saved, strict=True):
            indexer.index_topk = top_k


def _scripted_examples(
    source: SourceConfig,
    pairs: Sequence[_ScriptedPair],
    tokenizer: PreTrainedTokenizerFast,
    tools_in_thinking: bool,
    max_context: int | None,
) -> list[_ExamplePair]:
    examples: list[_ExamplePair] = []
    with _name_script_in_errors(source):
        if not pairs:
            raise ValueError("the script made no conversation")
        for pair in pairs:
            known, solutions = {tool.name for tool in pair.tools}, list[_MaskedIds]()
            for messages in (pair.worked, pair.hasty):
                calls = [call for m in messages for call in m.get("tool_calls") or ()]
                if unknown := {call["function"]["name"] for call in calls} - known:
                    raise ValueError(f"calls {sorted(unknown)}; the tools are {sorted(known)}")
                solution = _conversation_ids(
                    tokenizer,
                    messages,
                    pair.tools,
                    thinking=source.thinking,
                    tools_in_thinking=tools_in_thinking,
                )
                if max_context is not None and (size := len(solution.ids)) > max_context:
                    raise ValueError(f"{size} tokens, model.tiny.max_context = {max_context}")
                solutions.append(solution)
            examples.append(_ExamplePair(*solutions))
    return examples


def _question_examples(
    source: SourceConfig, tokenizer: PreTrainedTokenizerFast, curriculum: Curriculum, count: int
) -> list[_ExamplePair]:
    # The import takes a second and builds a hundred tasks.
    import reasoning_gym  # noqa: PLC0415

    # reasoning_gym seeds entry i with seed + i, so run seeds must be at least `count` apart.
    first = curriculum.seed * max(_SEED_STRIDE, count)
    first = 2**31 + first % 2**30 if source.task in _NUMPY_SEEDED else _DATA_SEED + first
    params = {**source.params, "seed": first, "size": count}
    entries = [
        e for e in reasoning_gym.create_dataset(source.task, **params) if e["answer"] is not None
    ]
    if not entries:
        return []
    entries = [e for e in entries if e["question"] not in curriculum.heldout_questions]
    if not entries:
        raise ConfigError(
            f"data.sources[{source.name}]: every question of the cold start is held out. "
            "Widen the task (params), or hold out fewer prompts"
        )
    # Render the template once, around a marker for the question.
    system = [{"role": "system", "content": text}] if (text := system_of(source)) else []
    template = tokenizer.apply_chat_template(
        [*system, {"role": "user", "content": _MARKER}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=source.thinking,
    )
    assert isinstance(template, str)
    before, after = template.split(_MARKER)

    def encode(texts: list[str]) -> list[list[int]]:
        return tokenizer(texts, add_special_tokens=False)["input_ids"]  # pyright: ignore

    def masked(prompt: list[int], answer: list[int]) -> _MaskedIds:
        return _MaskedIds(prompt + answer, [False] * len(prompt) + [True] * len(answer))

    prompts = encode([f"{before}{entry['question']}{after}" for entry in entries])
    if source.thinking:
        worked, hasty = (
            encode(
                [_format_solution(source.task, entry, worked=way) + TURN_END for entry in entries]
            )
            for way in (True, False)
        )
    else:  # the template has already closed the thinking block
        worked = hasty = encode([f"{entry['answer']}{TURN_END}" for entry in entries])
    return [
        _ExamplePair(*(masked(prompt, answer) for answer in answers))
        for prompt, *answers in zip(prompts, worked, hasty, strict=True)
    ]


def _batches(
    examples: Sequence[_ExamplePair],
    tokenizer: PreTrainedTokenizerFast,
    config: ColdStartConfig,
    rng: random.Random,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the inputs and targets for each step, [B, T] int64, right-padded."""
    order: list[int] = []
    for step in range(config.steps):
        worked_only = step < _WORKED_ONLY * config.steps
        while len(order) < config.batch_size:
            epoch = list(range(len(examples)))
            rng.shuffle(epoch)
            order += epoch
        batch, order = order[: config.batch_size], order[config.batch_size :]
        rows = [
            examples[index].worked
            if worked_only or rng.random() < config.worked_fraction
            else examples[index].hasty
            for index in batch
        ]
        longest = max(len(row.ids) for row in rows)
        tokens = np.full((len(rows), longest), tokenizer.pad_token_id, np.int64)
        targets = np.full((len(rows), longest), _IGNORED, np.int64)
        for index, row in enumerate(rows):
            ids = np.array(row.ids)
            tokens[index, : len(ids)] = ids
            targets[index, : len(ids) - 1] = np.where(row.learned[1:], ids[1:], _IGNORED)
        yield torch.from_numpy(tokens), torch.from_numpy(targets)


def demonstrate(config: Config, source: str, count: int) -> Sequence[_ScriptedPair]:
    """Run a source's script to create about `count` conversations."""
    (config_of,) = (each for each in config.data.sources if each.name == source)
    script = demonstrator(config_of)
    arguments = deepcopy(dict(config_of.environment.arguments))  # the episodes need the original
    make = partial(script, count, seed=config.run.seed, arguments=arguments)
    pairs = on_thread(lambda: list(make()), "demonstrations")
    seconds = config.model.tiny.cold_start.max_seconds
    with _name_script_in_errors(config_of):
        try:
            return pairs.result(seconds)
        except TimeoutError:
            raise TimeoutError(
                f"no conversations within model.tiny.cold_start.max_seconds = {seconds:g}. The "
                "script and its environment must terminate"
            ) from None


def demonstrator(source: SourceConfig) -> Callable[..., Any]:
    """Import the script that writes a source's demonstrations. Raises ConfigError if the import
    fails."""
    module, _, name = source.environment.demonstrations.partition(":")
    with _name_script_in_errors(source):
        _script_file(source)
        return getattr(import_module(module), name)


def script_digest(source: SourceConfig) -> str:
    """Hash the files of a script and its environment. Returns "" if they ship with Keel."""
    with _name_script_in_errors(source):
        script = _script_file(source)
    if script is None:
        return ""
    target = source.environment.target.rpartition(":")[0]
    file = target if target.endswith(".py") else f"{target.replace('.', '/')}.py"
    environment = Path(source.environment.folder, file).absolute()
    contents = [path.read_bytes() if path.is_file() else b"" for path in (script, environment)]
    return sha256(b"\0".join(contents)).hexdigest()


def _script_file(source: SourceConfig) -> Path | None:
    module = source.environment.demonstrations.partition(":")[0]
    if module.startswith("keel."):  # the folder may be untrusted, see `keel replay`
        return None
    folder = Path(source.environment.folder).absolute()
    if str(folder) not in sys.path:
        sys.path.append(str(folder))  # last, so that a `json.py` in it does not replace json
    spec = find_spec(module)
    return Path(spec.origin) if spec and spec.has_location and spec.origin else None


@contextmanager
def _name_script_in_errors(source: SourceConfig) -> Generator[None]:
    """Add the name of the source's script to all errors raised inside this context."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"data.sources[{source.name}].environment.demonstrations = "
            f"{source.environment.demonstrations!r}: {type(error).__name__}: {error}"
        ) from error


def _conversation_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    tools_in_thinking: bool = False,
) -> _MaskedIds:
    """Tokenize a conversation the way rollouts do, by appending each turn to the ids of the earlier
    ones. Returns the ids up to the last assistant turn, along with a mask of the assistant's
    tokens. If `tools_in_thinking` is set, a turn with calls leaves its thinking block open for the
    next turn. Raises ValueError if there is no assistant turn, or if later messages change how the
    template renders earlier ones, for example because a second user message removes thinking."""
    ids: list[int] = []
    by_policy: list[bool] = []
    done = ""
    inside = False

    def add(text: str, *, sampled: bool) -> None:
        new: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
        ids.extend(new)
        by_policy.extend([sampled] * len(new))

    def render(stop: int, *, add_generation_prompt: bool) -> str:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages[:stop]],
            tools=[tool.as_json() for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinking,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(place, add_generation_prompt=True)
        after = render(place + 1, add_generation_prompt=False)
        turn, end, _ = after[len(before) :].rpartition(TURN_END)
        interrupted = tools_in_thinking and done and messages[place - 1]["role"] != "tool"
        if interrupted or not (before.startswith(done) and after.startswith(before) and end):
            raise ValueError(f"message {place} changes how the template renders earlier messages")
        add(before[len(done) :], sampled=False)
        done = before + turn + end
        if tools_in_thinking:
            turn = _with_calls_in_thinking(message, turn, continues=inside)
            inside = bool(message.get("tool_calls"))
        add(turn + end, sampled=True)
    if not ids:
        raise ValueError("the conversation has no assistant turn to learn from")
    return _MaskedIds(ids, by_policy)


def _with_calls_in_thinking(message: Mapping[str, Any], turn: str, *, continues: bool) -> str:
    reasoning = str(message.get("reasoning_content") or "").strip("\n")
    thought = ("" if continues else f"{THINK_START}\n") + (f"{reasoning}\n" if reasoning else "")
    after = turn.rpartition(THINK_END)[2].lstrip("\n")
    return thought + after if message.get("tool_calls") else f"{thought}{THINK_END}\n\n{after}"


@dataclass(frozen=True, slots=True)
class _Taught:
    working: Callable[[_Metadata], str]
    hasty: Callable[[_Metadata], str]
    covers: Callable[[_Metadata], bool] = lambda metadata: True


def _chain_steps(metadata: _Metadata) -> str:
    """Work out an arithmetic chain, one operation per line: `4 - 1 - 7` gives `3 - 7`,
    then `-4`."""
    terms = str(metadata["expression"]).split(" ")
    lines: list[str] = []
    while len(terms) > 1:
        left, sign, right, *rest = terms
        terms = [str(int(left) + (1 if sign == "+" else -1) * int(right)), *rest]
        lines.append(" ".join(terms))
    return "\n".join(lines) or terms[0]


def _chain_hasty(metadata: _Metadata) -> str:
    shorter = " ".join(str(metadata["expression"]).split(" ")[:-2])
    return _chain_steps({"expression": shorter}).split("\n")[-1] if shorter else "0"


def _spell_steps(metadata: _Metadata) -> str:
    """Number the letters of a word: `sun` becomes `1s2u3n`."""
    return "".join(f"{i % 10}{letter}" for i, letter in enumerate(str(metadata["word"]), start=1))


def _gcd_steps(metadata: _Metadata) -> str:
    """Work out a greatest common divisor with Euclid's algorithm. For each number after the first,
    a line lists the sequence of remainders: `24 18 6 0`."""
    result, *others = (int(number) for number in metadata["numbers"])
    lines: list[str] = []
    for number in others:
        chain = [result, number]
        while chain[-1]:
            chain.append(chain[-2] % chain[-1])
        result = chain[-2]
        lines.append(" ".join(map(str, chain)))
    return "\n".join(lines)


def _spiral_steps(metadata: _Metadata) -> str:
    rows = [list(map(str, row)) for row in metadata["matrix"]]
    lines: list[str] = []
    while rows:
        lines.append(" ".join(rows[0]))
        # Rotate the remaining rows counter-clockwise: the right column becomes the top row.
        rows = [list(column) for column in zip(*rows[1:], strict=True)][::-1]
    return "\n".join(lines)


_CHAIN = _Taught(
    working=_chain_steps,
    hasty=_chain_hasty,
    covers=lambda m: bool(re.fullmatch(r"-?\d+( [+-] -?\d+)*", str(m["expression"]))),
)
TAUGHT: Mapping[str, _Taught] = {
    "basic_arithmetic": _CHAIN,
    "chain_sum": _CHAIN,
    # The hasty answer is the smallest number, the word itself, or the matrix row by row.
    "gcd": _Taught(working=_gcd_steps, hasty=lambda m: str(min(m["numbers"]))),
    "spell_backward": _Taught(working=_spell_steps, hasty=lambda m: str(m["word"])),
    "spiral_matrix": _Taught(
        working=_spiral_steps,
        hasty=lambda m: " ".join(str(number) for row in m["matrix"] for number in row),
    ),
}
"""Tasks whose solutions are taught, keyed by their names in reasoning_gym."""


def _format_solution(task: str, entry: Mapping[str, Any], *, worked: bool) -> str:
    """Format the teacher's answer to a question, without the end-of-turn token."""
    metadata, steps, answer = entry["metadata"], "", str(entry["answer"])
    taught = TAUGHT.get(task)
    if taught is not None and taught.covers(metadata):
        if worked:
            steps = taught.working(metadata)
        else:
            answer = taught.hasty(metadata)
    return f"<think>\n{steps}\n</think>\n\n{answer}"
