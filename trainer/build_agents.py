"""Wiring of agents: from a recipe's environments to the runner of their episodes."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from keel.agents.budget import Budget
from keel.agents.context import ContextManager
from keel.agents.endpoint.probe import try_program
from keel.agents.endpoint.program import AgentProgram, command_of
from keel.agents.env_process.client import KEEL, Deadlines, Hosted, Program, fork_server_for
from keel.agents.env_process.fork_server import ForkServer
from keel.agents.env_process.os_limits import make_room
from keel.agents.env_process.process import Wrap, not_wrapped
from keel.agents.environments.interpreter import CELL_S, ENDING_S, split_call_time
from keel.agents.episode import POLICY_PHASES
from keel.agents.mcp_client import McpEpisode, McpServer
from keel.agents.probe import probe
from keel.agents.runner import PURPOSES, EpisodeLimits, EpisodeRunner, TurnSampler, environment_seed
from keel.agents.system_prompt import SystemPrompt, WithSystemPrompt
from keel.agents.types import Environment, NoEnvironment
from keel.configs.paths import data_path
from keel.configs.schema import Config, ConfigError, EnvironmentConfig, SourceConfig
from keel.configs.sections.model import TINY_MODEL
from keel.configs.system_prompts import system_prompt
from keel.data.dataset import Dataset
from keel.data.rows.places import cached_places
from keel.model.tiny.demonstrations import demonstrated, demonstrator
from keel.rewards.compose import unknown_parts
from keel.rewards.sandbox.environments import Network, environment_wrap
from keel.rewards.sandbox.runtime import runtime
from keel.rl.turns import Chat
from keel.rl.types import Prompt
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.chat.eos_ids import ends_of
from keel.rollout.chat.template_checks import check_calls_in_thinking, check_prefix_law, turn_ids

SHOWN = 8
"""Number of tools named in the notes before a run."""
CRASHES = {"drop": (), "zero": POLICY_PHASES, "zero-in-grading-too": (*POLICY_PHASES, "verdict")}
"""`on_crash` → the phases in which a lost environment counts as the policy's failure."""
STARTING = 8
"""Environments that start at the same time; more would slow each other down."""


def check_chat(config: Config, tokenizer: Any) -> TemplateChat | None:
    """Return the model's chat format, checked to extend conversations without tools
    (`check_environments` checks those with); None where no source has an environment.

    Raises ConfigError.
    """
    if not config.with_agents:
        return None
    modes = {source.thinking for source in config.data.sources if source.environment.enabled}
    ends = () if config.model.path == TINY_MODEL else ends_of(config.model.path)
    try:
        chat = TemplateChat(
            tokenizer,
            tools_in_thinking=config.agents.tools_in_thinking,
            ends=ends,
            marks=config.model.thinking_marks,
        )
        check_prefix_law(chat, modes=sorted(modes), tools=())
        if chat.tools_in_thinking:
            check_prefix_law(chat, modes=sorted(modes))
            check_calls_in_thinking(chat)
    except ValueError as error:
        raise _unfit(config, error) from error
    return chat


def _unfit(config: Config, error: ValueError) -> ConfigError:
    return ConfigError(f"model.path = {config.model.path!r}, with environments: {error}")


def check_environments(
    config: Config, chat: TemplateChat | None, dataset: Dataset
) -> dict[str, str]:
    """Open and close one episode of each environment, and check that the chat format extends
    conversations with tools if any of them has tools. Returns a note by source, for people.

    Raises ConfigError with what is wrong and its cure.
    """
    notes: dict[str, str] = {}
    if config.with_agents:
        try:
            driven = any(source.environment.program for source in config.data.sources)
            make_room(len(PURPOSES) * config.agents.max_concurrent_episodes, programs=driven)
        except ValueError as error:
            raise ConfigError(
                f"agents.max_concurrent_episodes = {config.agents.max_concurrent_episodes}: {error}"
            ) from error
    for source in config.data.sources:
        if not source.environment.enabled:
            continue
        if config.model.path == TINY_MODEL and demonstrated(source):
            demonstrator(source)
        prompts = (
            *dataset.train.sources.get(source.name, ()),
            *dataset.heldout.get(source.name, ()),
        )
        task = prompts[0]
        if source.source == "environment":  # the last: a `size` too large is found here
            task = max(prompts, key=lambda each: int(each.prompt_id.rpartition("/")[2]))
        try:
            notes |= asyncio.run(_looked_at(config, source, task, chat))
        except ConfigError:  # names its knob
            raise
        except ValueError as error:
            raise ConfigError(f"data.sources[{source.name}].environment: {error}") from error
    if chat is not None and chat.tool_modes:
        try:
            check_prefix_law(chat, modes=sorted(chat.tool_modes))
        except ValueError as error:
            raise _unfit(config, error) from error
    return notes


async def _looked_at(
    config: Config, source: SourceConfig, task: Prompt, chat: TemplateChat | None
) -> dict[str, str]:
    """Raises ValueError."""
    notes: dict[str, str] = {}
    seed = environment_seed(config.run.seed, task)
    if (made := made_from(config, source)) is not None:
        found = await probe(
            made,
            task=task,
            seed=seed,
            chat=chat,
            window=config.budget(source.domain_name).window,
            thinking=source.thinking,
            prompt=system_prompt_of(config, source),
        )
        names = [tool.name for tool in found.tools]
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        later = f", then {found.forked_s:.2f} s each, forked" if found.forked_s else ""
        later += f", each by itself: {found.why_not}" if found.why_not else ""
        own = config.budget(source.domain_name)
        room = own.window - (found.opening_tokens or 0)
        little = ""
        if room < own.max_tokens:
            little = (
                f". WARNING: that leaves {room} tokens of the window of {own.window} "
                f"(agents.window), and a turn may take {own.max_tokens}"
            )
        if found.parts is not None and (odd := unknown_parts(source.rewards, found.parts)):
            little += f". WARNING: {odd}"
        notes[f"{source.name}, its environment"] = (
            f"opens in {found.seconds:.1f} s{later}, with {found.opening_tokens} tokens; tools: "
            f"{', '.join(names[:SHOWN]) or 'none'}{more}{little}"
        )
    if (driver := agent_program(config, source)) is not None:
        assert chat is not None
        tried = await try_program(
            driver,
            maker(config, source)(),
            task=task,
            seed=seed,
            chat=chat,
            speak=partial(spoken_ids, chat, thinking=source.thinking),
            budget=budget(config, source),
        )
        notes[f"{source.name}, its program"] = (
            f"asked a model by script for {tried.turns} turns, the first after "
            f"{tried.opening_tokens} tokens, and {tried.ended} ({tried.seconds:.1f} s)"
        )
    return notes


def spoken_ids(chat: TemplateChat, text: str, *, thinking: bool) -> list[int]:
    """Return the ids that a policy samples to say `text`."""
    question = [{"role": "user", "content": "?"}]
    thought = {"reasoning_content": "Hm."} if thinking else {}  # some formats need it
    turn = {"role": "assistant", **thought, "content": text}
    return turn_ids(chat, question, turn, question, (), thinking=thinking)


def made_from(config: Config, source: SourceConfig) -> Program | McpServer | None:
    """Return the specification of a source's environment; None for a program without one. Raises
    ConfigError, also if this machine cannot isolate it."""
    given = source.environment
    if given.program_only:
        return None
    try:
        return program(config, source) if given.target else mcp_server(config, source)
    except ValueError as error:
        raise ConfigError(f"data.sources[{source.name}].environment: {error}") from error


def episode_runner(config: Config, chat: Chat, turns: TurnSampler) -> EpisodeRunner:
    """Build and start the episode runner. Raises ConfigError for an invalid environment."""
    agents = config.agents
    starting = asyncio.Semaphore(STARTING)
    given = [source for source in config.data.sources if source.environment.enabled]
    programs = {source.name: agent_program(config, source) for source in given}
    parents: list[ForkServer] = []

    def context(source: SourceConfig) -> ContextManager:
        return ContextManager(
            method=agents.context,
            window=config.budget(source.domain_name).window,
            most=agents.max_rewrites,
            summary_tokens=agents.summary_tokens,
        )

    environments = {source.name: maker(config, source, starting, parents) for source in given}
    return EpisodeRunner(
        environments,
        programs={name: found for name, found in programs.items() if found is not None},
        closing=[parent.close for parent in parents],
        chat=chat,
        turns=turns,
        limits={
            source.name: EpisodeLimits(budget(config, source), context(source)) for source in given
        },
        seed=config.run.seed,
        most_open=agents.max_concurrent_episodes,
        crash_is_failure={
            source.name: CRASHES[source.environment.on_crash] for source in config.data.sources
        },
    )


def budget(config: Config, source: SourceConfig) -> Budget:
    own = config.budget(source.domain_name)
    return Budget(
        turns=own.max_turns,
        turn_tokens=own.max_tokens,
        tokens=own.max_sampled_tokens or sys.maxsize,
        window=own.window,
        timeout_s=config.rollout.timeout_s,
        call_s=own.call_s,
        calls=config.agents.max_thinking_calls if config.agents.tools_in_thinking else math.inf,
    )


def maker(
    config: Config,
    source: SourceConfig,
    starting: asyncio.Semaphore | None = None,
    parents: list[ForkServer] | None = None,
) -> Callable[[], Environment]:
    """Makes an environment for each episode. parents: what forks them is added; None: they are
    started. Raises as `made_from`."""
    made, prompt = made_from(config, source), system_prompt_of(config, source)
    if made is None:
        return lambda: WithSystemPrompt(NoEnvironment(), prompt)
    if not isinstance(made, Program):
        return lambda: WithSystemPrompt(McpEpisode(made, starting=starting), prompt)
    parent = fork_server_for(made) if parents is not None else None
    if parents is not None and parent is not None:
        parents.append(parent)
    return lambda: WithSystemPrompt(Hosted(made, starting=starting, parent=parent), prompt)


def system_prompt_of(config: Config, source: SourceConfig) -> SystemPrompt:
    """What the template of a source says of its environment's tools."""
    arguments = source.environment.arguments
    cell_s, ending_s = (
        own if isinstance(own := arguments.get(name), int | float) else default
        for name, default in (("cell_s", CELL_S), ("ending_s", ENDING_S))
    )
    cell_s, *_ = split_call_time(cell_s, ending_s, config.budget(source.domain_name).call_s)
    return lambda tools: system_prompt(
        source.system_template,
        tools=tools,
        calls=config.agents.max_thinking_calls,
        seconds=cell_s,
    )


def program(config: Config, source: SourceConfig) -> Program:
    given = source.environment
    arguments, made = prepared(config, source)
    return Program(
        target=given.target,
        kind=given.kind,
        arguments=arguments,
        python=given.python or sys.executable,
        folder=Path(given.folder) if given.folder else None,
        env=given.env,
        preload=given.preload,
        memory_mib=given.memory_mib,
        deadlines=deadlines(given),
        readable=(*readable(given), *made),
        wrap=wrap(config, source),
    )


def prepared(config: Config, source: SourceConfig) -> tuple[Mapping[str, Any], Sequence[Path]]:
    """The arguments of an environment, and files that it reads in its sandbox: one of Keel's own
    may have something made of them before, such as the index of a corpus. Raises ValueError."""
    given = source.environment
    module = given.target.partition(":")[0]
    prepare = getattr(import_module(module), "prepare", None) if _is_ours(module) else None
    if prepare is None:
        return given.arguments, ()
    try:
        return prepare(given.arguments, [*_prompt_files(config)])
    except OSError as error:
        raise ValueError(f"{given.target}: {error}") from error


def _is_ours(module: str) -> bool:
    return module.startswith("keel.agents.environments.")


def agent_program(config: Config, source: SourceConfig) -> AgentProgram | None:
    """What drives the episodes of a source; None: Keel does. Raises ConfigError."""
    given = source.environment
    if not given.program:
        return None
    python, folder = given.python or sys.executable, Path(given.folder or ".").absolute()
    try:
        command = command_of(given.program, python=python, folder=folder)
        isolated = wrap(config, source, network="loopback" if given.network == "none" else "host")
        own = runtime(command[0]).paths if isolated is not not_wrapped else ()
        return AgentProgram(
            command=command,
            open_s=given.open_s,
            python=python,
            folder=folder,
            env=given.env,
            memory_mib=given.memory_mib,
            wrap=isolated,
            readable=(*own, *readable(given)),
            tells_reward=given.tells_reward,
            drop_failures=given.on_failure == "drop",
            judges=not given.target,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"data.sources[{source.name}].environment: {error}") from error


def mcp_server(config: Config, source: SourceConfig) -> McpServer:
    given = source.environment
    return McpServer(
        command=given.command,
        url=given.url,
        folder=Path(given.folder) if given.folder else None,
        env=given.env,
        deadlines=deadlines(given),
        readable=readable(given),
        wrap=wrap(config, source) if given.command else not_wrapped,
    )


def readable(given: EnvironmentConfig) -> tuple[Path, ...]:
    return tuple(map(Path, given.readable))


def wrap(config: Config, source: SourceConfig, *, network: Network | None = None) -> Wrap:
    """Raises ValueError where this machine cannot isolate it. network: None, as the recipe says.

    It does not see the run, nor the files that prompts come from, nor what makes procedural ones,
    unless they are `readable` by name: they hold the answers, and what the policy runs reads what
    an environment does."""
    given = source.environment
    named = {Path(path).resolve() for path in given.readable}
    answers = [*_prompt_files(config), *_generators(config, given.python or sys.executable)]
    answers = [path for path in answers if path.resolve() not in named]
    return (
        environment_wrap(
            given.isolation,
            memory_mib=given.memory_mib,
            network=network or given.network,
            hidden=(Path(config.run.dir), *answers),
            knob=f"data.sources[{source.name}].environment.isolation",
        )
        or not_wrapped
    )


def _prompt_files(config: Config) -> list[Path]:
    sources = [source for source in config.data.sources if source.path]
    own = [data_path(source.path) for source in sources if source.source != "hub"]
    return own + (cached_places() if len(own) < len(sources) else [])


def _generators(config: Config, python: str) -> list[Path]:
    """What prompts were made by: with the seed, which can be tried, it says their answers."""
    found = [(KEEL / name).resolve() for name in ("synthesis", "examples")]
    if any(source.source == "reasoning_gym" for source in config.data.sources):
        with suppress(FileNotFoundError):  # where there is no such interpreter, others say so
            for path in runtime(python).paths:
                found += path.glob("python3*/site-packages/reasoning_gym")
    return found


def deadlines(given: EnvironmentConfig) -> Deadlines:
    return Deadlines(open_s=given.open_s, reply_s=given.reply_s, verdict_s=given.verdict_s)
