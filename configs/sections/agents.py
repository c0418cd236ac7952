"""Environments, and how a policy works in them over many turns."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from keel.configs.sections.base import ConfigError, require


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What the policy works in: an environment of Keel's or your own (`target`), or an MCP server
    (`command` or `url`); and who drives it, where that is a `program` of yours and not Keel."""

    target: str = ""
    """`my_env:Shop`, `my_tools` (a module of functions) or `path/to/file.py:Shop`."""
    kind: Literal["auto", "class", "functions", "game", "openenv"] = "auto"
    """auto: a class with `reset` and `step` is a game, any other class has its public methods as
    tools, and a module its functions; one of OpenEnv's is known by itself, and so is the address of
    its server."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of the class, by name."""
    command: tuple[str, ...] = ()
    """An MCP server over stdio, one process an episode; `{seed}` in it is the task's."""
    url: str = ""
    """An MCP server over HTTP, shared by all episodes."""
    program: str = ""
    """An agent program with a loop of its own, which asks the policy for its turns through an
    endpoint like OpenAI's: a command line, in which `{prompt}` is the task's last user message, or
    `my_agent:solve` or `path/to/file.py:solve`, a Python function. With an environment beside it,
    that opens the task and grades; else the program grades, or the prompt's answer, tests or
    criteria do: docs/agents-endpoint.md."""
    tells_reward: bool = False
    """program: whether it is told what the reward is computed from (a reference answer). The policy
    can read it wherever the program lets it run commands."""
    demonstrations: str = ""
    """`module:function` that scripts conversations in it, for the cold start of the tiny model:
    one of `keel.agents.environments.demonstrations`, or your own (docs/environments.md)."""
    python: str = ""
    """Its interpreter, 3.9 or later, which needs nothing of Keel's; empty: Keel's own. A program's
    command is looked for beside it, too."""
    folder: str = ""
    """Where it runs and where its modules are looked for first; empty: here."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables. It sees few others: no key and no token of yours."""
    memory_mib: int = 4096
    """Address space of each of its processes."""
    preload: bool = True
    """Import its module once and fork a process for each episode, where that is safe: it must do
    nothing at import that episodes are not to share. false: a new interpreter for each."""
    readable: tuple[str, ...] = ()
    """Files and folders that it may read beyond its own folder and interpreter."""
    isolation: Literal["bubblewrap", "none-i-trust-the-environments"] = "bubblewrap"
    """bubblewrap: namespaces without files of yours, refused where it does not work. The other runs
    what the policy makes it run with your rights."""
    network: Literal["none", "host"] = "none"
    """What it may reach."""
    on_crash: Literal["drop", "zero", "zero-in-grading-too"] = "drop"
    """An episode whose environment crashes, hangs (`agents.call_s`) or ends over what the policy
    did: left out; or worth the least that its rewards allow. zero is for an environment that
    nothing else brings down: with drop, a policy that crashes it evades a bad reward.
    zero-in-grading-too is for one whose grader runs what the policy wrote."""
    on_failure: Literal["zero", "drop"] = "zero"
    """program: a trajectory whose program fails, by its status or a signal, after a turn of the
    policy: worth the least that its rewards allow; or left out, for a program that fails for
    reasons of its own. It is left out in any case where an engine or the endpoint failed it."""
    open_s: float = 60.0
    """Seconds to start it and set a task up; for a program, until it asks for its first turn."""
    reply_s: float = 30.0
    """Seconds for the user's next message."""
    verdict_s: float = 60.0
    """Seconds to grade."""

    @property
    def alone(self) -> bool:
        """Whether there is no environment beside a program."""
        return not (self.target or self.command or self.url)

    @property
    def given(self) -> bool:
        return bool(self.program) or not self.alone

    @property
    def grades(self) -> bool:
        """Whether it may have a verdict: an MCP server has none."""
        return bool(self.target or self.program)

    @property
    def said(self) -> str:
        """The environment, as people call it."""
        return self.target or self.url or " ".join(self.command)

    def __post_init__(self) -> None:
        knob = "data.sources[].environment"
        ways = [bool(self.target), bool(self.command), bool(self.url)]
        require(
            sum(ways) <= 1,
            f"{knob}.target",
            self.target,
            "name one of target, command and url: each is an environment of its own",
        )
        require(
            not self.target.startswith(":"),
            f"{knob}.target",
            self.target,
            "write module:name or path/to/file.py:name",
        )
        try:
            words = shlex.split(self.program)
        except ValueError as error:
            raise ConfigError(f"{knob}.program = {self.program!r}: {error}") from error
        require(
            bool(words) or not self.program,
            f"{knob}.program",
            self.program,
            "name a command line, or module:function",
        )
        require(
            not self.tells_reward or bool(self.program),
            f"{knob}.tells_reward",
            self.tells_reward,
            "belongs to program",
        )
        require(
            not self.arguments or bool(self.target),
            f"{knob}.arguments",
            dict(self.arguments),
            "belongs to target",
        )
        require(
            self.on_crash == "drop" or not self.url,
            f"{knob}.on_crash",
            self.on_crash,
            "belongs to target and command: all episodes share the server behind url, so whose "
            "doing its end was cannot be known",
        )
        require(
            self.on_crash == "drop" or not self.alone,
            f"{knob}.on_crash",
            self.on_crash,
            "belongs to target and command: there is no environment that could crash; for a "
            "program that fails see on_failure",
        )
        require(
            self.on_failure == "zero" or bool(self.program),
            f"{knob}.on_failure",
            self.on_failure,
            "belongs to program",
        )
        require(
            self.memory_mib >= 64,
            f"{knob}.memory_mib",
            self.memory_mib,
            "must be at least 64: an interpreter alone takes that",
        )
        for name in ("open_s", "reply_s", "verdict_s"):
            require(getattr(self, name) > 0, f"{knob}.{name}", getattr(self, name), "must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsConfig:
    """What a trajectory in an environment may take. One turn takes at most
    `rollout.sampling.max_tokens`; a trajectory at most `rollout.timeout_s` in engines and
    tools."""

    max_turns: int = 16
    """Turns of the policy in a trajectory, at most."""
    max_sampled_tokens: int = 0
    """Sampled in all its turns; 0: no further limit."""
    window: int = 0
    """Tokens of a context with what is sampled after it; 0: data.max_prompt_tokens +
    rollout.sampling.max_tokens."""
    call_s: float = 60.0
    """Seconds for one tool call."""
    tools_in_thinking: bool = False
    """A policy of its own: tools are called inside the thinking, which goes on after each result,
    and nowhere else. DeepSeek-V3.2, Appendix B, Table 8."""
    max_thinking_calls: int = 20
    """Calls of a trajectory that are run then, at most; later ones are answered with an error."""
    context: Literal["none", "summary", "discard-75", "discard-all"] = "none"
    """What to do when a context has filled 80 % of its window: DeepSeek-V3.2, section 4.4."""
    max_rewrites: int = 4
    """How often that is done in a trajectory, at most."""
    summary_tokens: int = 1024
    """summary: room for the policy's summary and for what asks for it."""
    max_concurrent_episodes: int = 256
    """Episodes open at once, and as many for an evaluation; the others wait. Each has a process of
    its own."""

    def __post_init__(self) -> None:
        for name in (
            "max_turns",
            "summary_tokens",
            "max_concurrent_episodes",
            "max_thinking_calls",
        ):
            require(getattr(self, name) >= 1, f"agents.{name}", getattr(self, name), "must be >= 1")
        for name in ("max_sampled_tokens", "window", "max_rewrites"):
            value = getattr(self, name)
            require(value >= 0, f"agents.{name}", value, "must not be negative")
        require(self.call_s > 0, "agents.call_s", self.call_s, "must be > 0")
