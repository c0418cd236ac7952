"""Build the environments, agent programs and episode runner for a recipe."""

import asyncio
import math
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from keel.agents.endpoint.program import resolve_command
from keel.agents.env_process.client import ForkServerClient, ProcessEnvironment
from keel.agents.env_process.launch import (
    KEEL,
    AgentProgram,
    EnvironmentProgram,
    EnvSandbox,
)
from keel.agents.environments.interpreter import CELL_S, ENDING_S, split_call_time
from keel.agents.episode import Budget, EpisodeSettings
from keel.agents.mcp_client import McpEnvironment
from keel.agents.probe import try_environment, try_program
from keel.agents.runner import (
    PURPOSES,
    EpisodeRunner,
    SubmitTurn,
    environment_seed,
    raise_file_limit,
)
from keel.agents.types import Environment, NoEnvironment
from keel.configs.paths import data_path
from keel.configs.schema import Config, ConfigError, SourceConfig
from keel.configs.sections.model import TINY_MODEL
from keel.configs.system_prompts import system_prompt
from keel.data.dataset import Dataset
from keel.data.rows import cached_places
from keel.model.tiny.cold_start import demonstrator
from keel.rewards.compose import unknown_parts
from keel.rewards.sandbox.environments import Network, environment_sandbox, find_runtime
from keel.rl.turns import Chat
from keel.rl.types import Prompt
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.template_checks import (
    check_calls_in_thinking,
    check_prefix_preserving,
    ends_of,
)

_CRASHES = {
    "drop": (),
    "zero": ("call", "reply"),
    "zero-in-grading-too": ("call", "reply", "verdict"),
}
"""Maps each value of `on_crash` to the phases in which a crash is blamed on the policy."""
MAX_STARTING = 8
"""Maximum number of environments that start at the same time."""


def check_chat(config: Config, tokenizer: Any) -> TemplateChat | None:
    """Return the model's chat format, or None if no source has an environment. Raises ConfigError
    if the format can't extend a conversation turn by turn."""
    if not config.with_agents:
        return None
    modes = {source.thinking for source in config.data.sources if source.environment.enabled}
    ends = () if config.model.path == TINY_MODEL else ends_of(config.model.path)
    try:
        chat = TemplateChat(
            tokenizer,
            ends=ends,
            marks=config.model.thinking_marks,
        )
        check_prefix_preserving(chat, modes=sorted(modes), tools=())
        if any(map(config.calls_in_thinking, config.data.sources)):
            thinking_chat = chat.with_tools_in_thinking()
            check_prefix_preserving(thinking_chat, modes=[True])
            check_calls_in_thinking(thinking_chat)
    except ValueError as error:
        raise _unusable(config, error) from error
    return chat


def _unusable(config: Config, error: ValueError) -> ConfigError:
    return ConfigError(f"model.path = {config.model.path!r}, with environments: {error}")


def check_environments(
    config: Config, chat: TemplateChat | None, dataset: Dataset
) -> dict[str, str]:
    """Open and close one episode in each environment, and return a note for each source. Also check
    that the chat format can extend a conversation that uses the environment's tools. Raises
    ConfigError if a check fails."""
    notes: dict[str, str] = {}
    if chat is None:
        return notes
    most_open = config.max_episodes()
    try:
        driven = any(source.environment.program for source in config.data.sources)
        raise_file_limit(len(PURPOSES) * most_open, programs=driven)
    except ValueError as error:
        raise ConfigError(f"agents.max_concurrent_episodes = {most_open}: {error}") from error
    for source in config.data.sources:
        if not source.environment.enabled:
            continue
        if config.model.path == TINY_MODEL and source.environment.demonstrations:
            demonstrator(source)
        train, heldout = dataset.train.sources, dataset.heldout
        prompts = [*train.get(source.name, ()), *heldout.get(source.name, ())]
        task = prompts[0]
        if source.source == "environment":  # the last one exists only if `size` is not too large
            task = max(prompts, key=lambda each: int(each.prompt_id.rpartition("/")[2]))
        try:
            notes |= asyncio.run(_try_source(config, source, task, chat))
        except ConfigError:  # names its knob
            raise
        except ValueError as error:
            raise _invalid(source, error) from error
    if chat.tool_modes:
        try:
            check_prefix_preserving(chat, modes=sorted(chat.tool_modes))
        except ValueError as error:
            raise _unusable(config, error) from error
    return notes


async def _try_source(
    config: Config, source: SourceConfig, task: Prompt, chat: TemplateChat
) -> dict[str, str]:
    notes: dict[str, str] = {}
    seed = environment_seed(config.run.seed, task)
    prompt = _system_prompt_of(config, source)
    if (spec := environment_spec(config, source)) is not None:
        note, parts = await try_environment(
            spec,
            task=task,
            seed=seed,
            chat=chat,
            window=config.budget(source.domain_name).window,
            thinking=source.thinking,
            prompt=prompt,
        )
        if parts is not None and (problem := unknown_parts(source.rewards, parts)):
            note += f". WARNING: {problem}"
        notes[f"{source.name}, its environment"] = note
    if (driver := _agent_program(config, source)) is not None:
        notes[f"{source.name}, its program"] = await try_program(
            driver,
            environment_factory(config, source),
            task=task,
            seed=seed,
            chat=chat,
            turn_ids=partial(_turn_ids, chat, thinking=source.thinking),
            budget=budget(config, source),
            prompt=prompt,
        )
    return notes


def _invalid(source: SourceConfig, error: Exception) -> ConfigError:
    return ConfigError(f"data.sources[{source.name}].environment: {error}")


def _turn_ids(chat: TemplateChat, text: str, *, thinking: bool) -> list[int]:
    """Return the token ids that the policy would have to sample to produce `text`."""
    question = [{"role": "user", "content": "?"}]
    thought = {"reasoning_content": "Hm."} if thinking else {}  # some formats need it
    turn = {"role": "assistant", **thought, "content": text}
    return chat.turn_ids(question, turn, question, (), thinking=thinking)


def environment_spec(config: Config, source: SourceConfig) -> EnvironmentProgram | None:
    """Return the specification of a source's environment, or None if the source has an agent
    program but no environment. Raises ConfigError if the specification is invalid or this machine
    can't isolate the environment."""
    environment = source.environment
    if environment.program_only:
        return None
    try:
        arguments, files, prepare = environment.arguments, (), None
        module = environment.target.partition(":")[0]
        if module.startswith("keel.agents.environments."):
            prepare = getattr(import_module(module), "prepare", None)
        if prepare is not None:  # builds files first, for example a search index of a corpus
            arguments, files = prepare(arguments, _prompt_files(config))
        return EnvironmentProgram(
            target=environment.target,
            command=environment.command,
            url=environment.url,
            kind=environment.kind,
            arguments=arguments,
            python=environment.python or sys.executable,
            folder=Path(environment.folder) if environment.folder else None,
            env=environment.env,
            preload=environment.preload,
            memory_mib=environment.memory_mib,
            readable=(*map(Path, environment.readable), *files),
            sandbox=None if environment.url else sandbox_for(config, source),
            open_s=environment.open_s,
            reply_s=environment.reply_s,
            verdict_s=environment.verdict_s,
        )
    except (OSError, ValueError) as error:
        raise _invalid(source, error) from error


def episode_runner(
    config: Config,
    chat: Chat,
    submit_turn: SubmitTurn,
    create_on_node: Callable[[str, Callable[[], Environment], bool], Environment] | None = None,
    count_nodes: Callable[[], int] = lambda: 1,
) -> EpisodeRunner:
    """Build the runner for episodes in the environments. By default, all of them run on this
    machine. `create_on_node` (`WorkNodes.environment`) creates an environment on any node. Its
    arguments are the source's name, a function that creates the environment on this machine, and
    whether it has to be on this machine. `count_nodes` returns the number of nodes that run
    environments. Raises ConfigError if an environment is invalid."""
    starting = asyncio.Semaphore(MAX_STARTING)
    closing: list[Callable[[], Awaitable[None]]] = []

    def settings(source: SourceConfig) -> EpisodeSettings:
        own_chat = chat
        if isinstance(chat, TemplateChat) and config.calls_in_thinking(source):
            own_chat = chat.with_tools_in_thinking()
        create = environment_factory(config, source, starting, closing)
        is_movable = not (source.environment.program_only or source.environment.url)

        def environment(last_try: bool) -> Environment:
            if create_on_node is None or not is_movable:
                return create()
            return create_on_node(source.name, create, last_try)

        return EpisodeSettings(
            chat=own_chat,
            environment=environment,
            budget=budget(config, source),
            system_prompt=_system_prompt_of(config, source),
            program=_agent_program(config, source),
            crash_is_failure=_CRASHES[source.environment.on_crash],
        )

    sources = [source for source in config.data.sources if source.environment.enabled]
    return EpisodeRunner(
        {source.name: settings(source) for source in sources},
        closing=closing,
        submit_turn=submit_turn,
        seed=config.run.seed,
        most_open=lambda: config.max_episodes(count_nodes()),
    )


def budget(config: Config, source: SourceConfig) -> Budget:
    limits = config.budget(source.domain_name)
    return Budget(
        turns=limits.max_turns,
        turn_tokens=limits.max_tokens,
        tokens=limits.max_sampled_tokens or sys.maxsize,
        window=limits.window,
        timeout_s=config.rollout.timeout_s,
        call_s=limits.call_s,
        calls=config.agents.max_thinking_calls if config.calls_in_thinking(source) else math.inf,
        context=config.agents.context,
        max_rewrites=config.agents.max_rewrites,
        summary_tokens=config.agents.summary_tokens,
    )


def environment_factory(
    config: Config,
    source: SourceConfig,
    starting: asyncio.Semaphore | None = None,
    closing: list[Callable[[], Awaitable[None]]] | None = None,
) -> Callable[[], Environment]:
    """Return a function that creates the environment for an episode. `starting` limits how many
    environments start at the same time. Cleanup functions are appended to `closing`. If `closing`
    is None, episodes aren't forked."""
    spec = environment_spec(config, source)
    if spec is None:
        return NoEnvironment
    if not spec.target:
        return partial(McpEnvironment, spec, starting=starting)
    server = None
    if closing is not None:
        server = ForkServerClient(spec)
        closing.append(server.close)
    return partial(ProcessEnvironment, spec, starting=starting, fork_server=server)


def _system_prompt_of(config: Config, source: SourceConfig) -> Callable[[Sequence[str]], str]:
    arguments = source.environment.arguments
    cell_s, ending_s = (
        local if isinstance(local := arguments.get(name), int | float) else default
        for name, default in (("cell_s", CELL_S), ("ending_s", ENDING_S))
    )
    cell_s, *_ = split_call_time(cell_s, ending_s, config.budget(source.domain_name).call_s)
    return lambda tools: system_prompt(
        source.system_template,
        tools=tools,
        calls=min(
            config.agents.max_thinking_calls, config.budget(source.domain_name).max_turns - 1
        ),
        seconds=cell_s,
    )


def _agent_program(config: Config, source: SourceConfig) -> AgentProgram | None:
    environment = source.environment
    if not environment.program:
        return None
    python = environment.python or sys.executable
    folder = Path(environment.folder or ".").absolute()
    try:
        command = resolve_command(environment.program, python=python, folder=folder)
        network = "loopback" if environment.network == "none" else "host"
        sandbox = sandbox_for(config, source, network=network)
        local = find_runtime(command[0]).paths if sandbox else ()
        return AgentProgram(
            command=command,
            open_s=environment.open_s,
            python=python,
            folder=folder,
            env=environment.env,
            memory_mib=environment.memory_mib,
            sandbox=sandbox,
            readable=(*local, *map(Path, environment.readable)),
            tells_reward=environment.tells_reward,
            drop_failures=environment.on_failure == "drop",
            judges=not environment.target,
        )
    except (OSError, ValueError) as error:
        raise _invalid(source, error) from error


def sandbox_for(
    config: Config, source: SourceConfig, *, network: Network | None = None
) -> EnvSandbox | None:
    """Return a sandbox for an environment, or None if isolation is turned off. `network` overrides
    the recipe's setting.

    Code written by the policy can read every file that its environment can. The run folder, the
    prompt files and the generators of procedural prompts contain answers, so the sandbox hides them
    unless they are listed in `readable`. Raises ValueError if this machine can't isolate the
    environment.
    """
    environment = source.environment
    answers = [
        *_prompt_files(config),
        *((KEEL / name).resolve() for name in ("synthesis", "examples")),
    ]
    if any(each.source == "reasoning_gym" for each in config.data.sources):
        with suppress(FileNotFoundError):  # reported elsewhere
            for path in find_runtime(environment.python or sys.executable).paths:
                answers += path.glob("python3*/site-packages/reasoning_gym")
    named = {Path(path).resolve() for path in environment.readable}
    return environment_sandbox(
        environment.isolation,
        memory_mib=environment.memory_mib,
        network=network or environment.network,
        hidden=(Path(config.run.dir), *(path for path in answers if path.resolve() not in named)),
        knob=f"data.sources[{source.name}].environment.isolation",
    )


def _prompt_files(config: Config) -> list[Path]:
    sources = [source for source in config.data.sources if source.path]
    local = [data_path(source.path) for source in sources if source.source != "hub"]
    return local + (cached_places() if len(local) < len(sources) else [])
