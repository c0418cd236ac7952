"""Load scripted conversations for the cold start (`data.sources[].environment.demonstrations`)."""

import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from transformers import PreTrainedTokenizerFast

from keel.configs.schema import Config, ConfigError, SourceConfig
from keel.model.tiny.tokenizer import THINK_END, THINK_START, TURN_END
from keel.rl.futures import on_thread
from keel.rl.turns import Message, ToolSpec

_MAX_RATIO = 100
"""A script is treated as endless if it returns more than this many times the requested number of
conversations."""


@runtime_checkable
class ScriptedPair(Protocol):
    """A task in an environment with a careful and a hasty solution."""

    @property
    def tools(self) -> Sequence[ToolSpec]: ...
    @property
    def worked(self) -> Sequence[Message]: ...
    @property
    def hasty(self) -> Sequence[Message]: ...


def demonstrate(config: Config, source: str, count: int) -> Sequence[ScriptedPair]:
    """Run a source's script to create about `count` conversations."""
    (config_of,) = (each for each in config.data.sources if each.name == source)
    script = demonstrator(config_of)
    arguments = deepcopy(dict(config_of.environment.arguments))  # the episodes need the original
    limit = _MAX_RATIO * count

    def run() -> list[Any]:
        return list(islice(script(count, seed=config.run.seed, arguments=arguments), limit + 1))

    seconds = config.model.tiny.cold_start.max_seconds
    result = on_thread(run, "demonstrations")
    with name_script_in_errors(config_of):
        try:
            pairs = result.result(seconds)
        except TimeoutError:
            raise TimeoutError(
                f"no conversations within model.tiny.cold_start.max_seconds = {seconds:g}. The "
                "script and its environment must terminate"
            ) from None
        if len(pairs) > limit:
            raise ValueError(f"made more than {limit} conversations, {count} were requested")
        if wrong := [pair for pair in pairs if not isinstance(pair, ScriptedPair)]:
            raise TypeError(f"{wrong[0]!r} needs tools, worked and hasty")
    return pairs


def demonstrator(source: SourceConfig) -> Callable[..., Any]:
    """Import a source's script. Raises ConfigError if the import fails."""
    module, _, name = source.environment.demonstrations.partition(":")
    with name_script_in_errors(source):
        _script_file(source)
        return getattr(import_module(module), name)


def script_digest(source: SourceConfig) -> str:
    """Hash the files of a script and its environment. Returns "" if Keel ships them."""
    with name_script_in_errors(source):
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
def name_script_in_errors(source: SourceConfig) -> Generator[None]:
    """Name the source's script in all errors raised inside this context."""
    try:
        yield
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        raise ConfigError(
            f"data.sources[{source.name}].environment.demonstrations = "
            f"{source.environment.demonstrations!r}: {type(error).__name__}: {error}"
        ) from error


def conversation_ids(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec],
    *,
    thinking: bool,
    tools_in_thinking: bool = False,
) -> tuple[list[int], list[bool]]:
    """Tokenise a conversation as rollouts do, by appending each turn to the ids of earlier ones.
    Returns the ids up to the last assistant turn, and a mask of the assistant's tokens. If
    `tools_in_thinking` is set, a turn with calls leaves its thinking block open for the next turn.
    Raises ValueError if there is no assistant turn, or if later messages change how the template
    renders earlier ones, for example because a second user message removes thinking."""
    ids: list[int] = []
    by_policy: list[bool] = []
    done = ""
    inside = False

    def add(text: str, *, sampled: bool) -> None:
        new: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]  # pyright: ignore
        ids.extend(new)
        by_policy.extend([sampled] * len(new))

    def render(stop: int, *, speak: bool) -> str:
        text = tokenizer.apply_chat_template(
            [dict(message) for message in messages[:stop]],
            tools=[tool.as_json() for tool in tools] or None,
            add_generation_prompt=speak,
            enable_thinking=thinking,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(place, speak=True), render(place + 1, speak=False)
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
    return ids, by_policy


def _with_calls_in_thinking(message: Mapping[str, Any], turn: str, *, continues: bool) -> str:
    reasoning = str(message.get("reasoning_content") or "").strip("\n")
    thought = ("" if continues else f"{THINK_START}\n") + (f"{reasoning}\n" if reasoning else "")
    after = turn.rpartition(THINK_END)[2].lstrip("\n")
    return thought + after if message.get("tool_calls") else f"{thought}{THINK_END}\n\n{after}"
