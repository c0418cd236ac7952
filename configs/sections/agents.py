"""`agents` and `data.sources[].environment`: multi-turn environments and their limits."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import ConfigError, Section, knob

EPISODES_PER_NODE = 256
"""Maximum number of open episodes per node, unless `agents.max_concurrent_episodes` is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig(Section, path="data.sources[].environment"):
    """Settings for the environment that the policy acts in: a Python class or module (`target`) or
    an MCP server (`command` or `url`). It is driven by Keel or by an agent `program`."""

    target: str = ""
    """Environment in Python: `my_env:Shop`, `my_tools` (a module of functions) or
    `path/to/file.py:Shop`."""
    kind: Literal["auto", "class", "functions", "game", "openenv"] = "auto"
    """Interface of `target`. auto: a class with `reset` and `step` is a game, any other class
    offers its public methods as tools, and a module offers its functions. OpenEnv environments and
    server addresses are detected."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Keyword arguments for the class."""
    command: tuple[str, ...] = ()
    """Command line of an MCP server over stdio, one process per episode. `{seed}` is replaced by
    the task's seed."""
    url: str = ""
    """URL of an MCP server over HTTP that all episodes share."""
    program: str = ""
    """Agent program with its own loop, which samples from the policy through an OpenAI-compatible
    endpoint: a command line in which `{prompt}` is the last user message of the task, or a Python
    function `my_agent:solve` or `path/to/file.py:solve`. With an environment, the environment
    opens and grades the task; otherwise the program grades it, or the prompt's answer, tests or
    criteria do. docs/agents-endpoint.md"""
    tells_reward: bool = False
    """program: pass it the data from which the reward is computed, such as a reference answer. The
    policy can read this data wherever the program lets it run commands."""
    demonstrations: str = ""
    """`module:function` that scripts conversations for the cold start of the tiny model: one of
    `keel.agents.environments.demonstrations` or yours (docs/environments.md)."""
    python: str = ""
    """Python interpreter that runs the environment, 3.9 or later. Keel need not be installed in it.
    Empty: Keel's own. The command of a program is also looked up next to it."""
    folder: str = ""
    """Working directory, which is also first on the module path. Empty: the current directory."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables to set. Only a few others are passed on, and never keys or tokens."""
    memory_mib: int = knob(4096, ge=64)
    """Address space limit for each process, in MiB."""
    preload: bool = True
    """Import the module once and fork a process per episode where that is safe. The module must not
    create state at import that episodes may not share. false: start a new interpreter per
    episode."""
    readable: tuple[str, ...] = ()
    """Files and folders that the environment may read in addition to its folder and interpreter."""
    isolation: Literal["bubblewrap", "none-i-trust-the-environments"] = "bubblewrap"
    """bubblewrap: run in namespaces without access to your files, and fail where that is not
    possible. The alternative runs the policy's commands with your permissions."""
    network: Literal["none", "host"] = "none"
    """Whether the environment has network access."""
    on_crash: Literal["drop", "zero", "zero-in-grading-too"] = "drop"
    """Reward of an episode whose environment crashes, hangs (`agents.call_s`) or exits because of
    the policy. drop: leave it out of training. zero: give the minimum reward, so that a policy
    cannot escape a bad reward by crashing the environment. zero-in-grading-too: also for crashes
    while grading, for graders that run the policy's output."""
    on_failure: Literal["zero", "drop"] = "zero"
    """program: reward for a trajectory whose program exits with an error status or a signal after
    the policy's first turn. zero: the minimum reward. drop: leave it out. Failures of an engine or
    the endpoint are always left out."""
    open_s: float = knob(60.0, gt=0)
    """Timeout in seconds for starting the environment and opening a task. For a program, the time
    until its first request."""
    reply_s: float = knob(30.0, gt=0)
    """Timeout in seconds for the user's next message."""
    verdict_s: float = knob(60.0, gt=0)
    """Timeout in seconds for grading."""

    @property
    def program_only(self) -> bool:
        """True if no environment is set, so that a task has at most an agent program."""
        return not (self.target or self.command or self.url)

    @property
    def enabled(self) -> bool:
        return bool(self.program) or not self.program_only

    @property
    def grades(self) -> bool:
        """True if the environment can grade episodes, which an MCP server can't do on its own."""
        return bool(self.target or self.program)

    @property
    def label(self) -> str:
        return self.target or self.url or " ".join(self.command)

    def check(self) -> None:
        kinds = [bool(self.target), bool(self.command), bool(self.url)]
        self.require(sum(kinds) <= 1, "target", "set only one of target, command and url")
        named = not self.target.startswith(":")
        self.require(named, "target", "write module:name or path/to/file.py:name")
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            raise ConfigError(f"{self.PATH}.program = {self.program!r}: {error}") from error
        named = bool(words) or not self.program
        self.require(named, "program", "name a command line or a module:function")
        for name, default in (("tells_reward", False), ("on_failure", "zero")):
            ok = bool(self.program) or getattr(self, name) == default
            self.require(ok, name, "needs program")
        self.require(not self.arguments or bool(self.target), "arguments", "needs target")
        self.require(
            self.on_crash == "drop" or bool(self.target or self.command),
            "on_crash",
            "needs target or command. Episodes share the server behind a url, and for a program "
            "alone use on_failure",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsConfig(Section, path="agents"):
    """Limits for a trajectory in an environment. `rollout.sampling.max_tokens` also limits each
    turn, and `rollout.timeout_s` limits the trajectory's total time in engines and tools."""

    max_turns: int = knob(16, ge=1)
    """Maximum number of policy turns per trajectory."""
    max_sampled_tokens: int = knob(0, ge=0)
    """Maximum number of sampled tokens over all turns. 0: no limit."""
    window: int = knob(0, ge=0)
    """Context window in tokens, including the tokens sampled in it. 0: data.max_prompt_tokens +
    rollout.sampling.max_tokens."""
    call_s: float = knob(210.0, gt=0)
    """Timeout in seconds for one tool call. The default lets a cell of the code interpreter run for
    120 s, as in DeepSeek-V3.2, Appendix B, Table 7."""
    tools_in_thinking: bool = False
    """Let the policy call tools inside its reasoning, which continues after each result, and
    nowhere else. Sources with `thinking: false` or `system_template: tools` call them as usual.
    DeepSeek-V3.2, Appendix B, Table 8."""
    max_thinking_calls: int = knob(20, ge=1)
    """Maximum number of calls inside the reasoning per trajectory. More calls return an error."""
    context: Literal["none", "summary", "discard-75", "discard-all"] = "none"
    """What to do when the context reaches 80 % of the window: summarize it, or discard 75 % or all
    of the tool history. DeepSeek-V3.2, section 4.4."""
    max_rewrites: int = knob(0, ge=0)
    """Maximum number of times that the context is summarized or discarded per trajectory. 0: only
    `max_turns` limits them."""
    summary_tokens: int = knob(1024, ge=1)
    """summary: number of tokens to reserve for the summary and the request to write it."""
    max_concurrent_episodes: int = knob(0, ge=0, resumable=True)
    """Maximum number of open episodes, each with its own process. An evaluation may open the same
    number in addition. 0: 256 per node that runs environments, but no more than the engines
    sample at once and at least 256; always 256 with agent programs or a `url`."""
