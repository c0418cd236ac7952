"""All knobs of a run. A recipe (YAML) lists only the differences from these defaults.

Each section (`configs/sections/`) checks its bounds on creation, and `Config` checks the rules
between sections, so every `Config` object is valid. Other modules import the sections from here.
"""

# ruff: noqa: F401
# pyright: reportUnusedImport=false

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from keel.configs.paths import read_template
from keel.configs.sections.agents import EPISODES_PER_NODE, AgentsConfig, EnvironmentConfig
from keel.configs.sections.algorithm import AlgorithmConfig
from keel.configs.sections.base import ConfigError, Section, marked_knobs, require
from keel.configs.sections.data import BudgetConfig, DataConfig, LengthConfig, SourceConfig
from keel.configs.sections.evaluation import EndpointConfig, EvalConfig, EvalVariant, FilterConfig
from keel.configs.sections.model import (
    EXPERTS,
    TINY_MODEL,
    ColdStartConfig,
    Dtype,
    LoraConfig,
    ModelConfig,
    TinyModelConfig,
)
from keel.configs.sections.rewards import CodeConfig, JudgeConfig, JudgeServerConfig, RewardsConfig
from keel.configs.sections.rollout import CUT_S, RolloutConfig, SamplingConfig
from keel.configs.sections.run import AlarmsConfig, RunConfig
from keel.configs.sections.sft import ConversationsConfig, SftConfig
from keel.configs.sections.trainer import TrainerConfig

AUTO = "auto"
DTYPE = "model.dtype"
BUSY_S = 60.0
"""Seconds added to the time limit of a group, because the driver may be busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(Section):
    """The complete configuration of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rewards: RewardsConfig = field(default_factory=RewardsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    agents: AgentsConfig = field(default_factory=AgentsConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    alarms: AlarmsConfig = field(default_factory=AlarmsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    filter: FilterConfig = field(default_factory=FilterConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)

    def check(self) -> None:
        text = read_template(self.model.chat_template, "model.chat_template")
        if text != self.model.chat_template:
            object.__setattr__(self, "model", replace(self.model, chat_template=text))
        rule = "needs at least one source (or sft.sources for `keel sft` and `keel pretrain`)"
        self.require(bool(self.data.sources or self.sft.sources), "data.sources", rule)
        evaluated = [source.name for source in self.data.sources if source.holdout]
        for name in self.alarms.stop_below:
            ok = name in evaluated and self.run.eval_every > 0
            rule = "needs run.eval_every and a source of this name with a holdout"
            require(ok, "alarms.stop_below", name, rule)
        self.algorithm.check_sampling(self.rollout.sampling)
        self._check_engines()
        if self.model.batch_invariant:
            self._check_invariant()
        if self.model.lora.enabled:
            rule = "must be at most {} with model.lora"
            for name in ("hpz_partition_size", "expert_parallel"):
                ok = getattr(self.trainer, name) == 1
                self.require(ok, f"trainer.{name}", rule.format(1))
            self.require(self.trainer.zero_stage <= 2, "trainer.zero_stage", rule.format(2))
        if self.model.path == TINY_MODEL:
            self._check_tiny()
        for source in self.data.sources:
            self._check_budget(source)
            self._check_groups(source)
        if self.with_agents:
            self._check_agents()

    def _check_engines(self) -> None:
        rollout, alone = self.rollout, self.rollout.tensor_parallel == 1
        if rollout.colocated:
            rule = f"must be trainer.ranks = {self.trainer.ranks} with rollout.colocated"
            self.require(rollout.engines == self.trainer.ranks, "rollout.engines", rule)
            self.require(alone, "rollout.tensor_parallel", "must be 1 with rollout.colocated")
        rule = "must be 1 with model.residual_dtype: float32"
        self.require(alone or not self.model.wide_residual, "rollout.tensor_parallel", rule)
        rule = "must be above 1 with rollout.expert_parallel"
        self.require(not (alone and rollout.expert_parallel), "rollout.tensor_parallel", rule)
        whole = self.engine_dtype == "float32" or self.model.residual_dtype == "float32"
        rule = "must be empty if rollout.dtype, model.dtype or model.residual_dtype is float32"
        self.require(not (rollout.quantization and whole), "rollout.quantization", rule)
        ahead = self.algorithm.max_lag or self.algorithm.publish_every > 1
        if rollout.weight_updates == "drain" and ahead:
            longest = rollout.timeout_s + 2 * CUT_S
            self.require(
                rollout.update_timeout_s >= longest,
                "rollout.update_timeout_s",
                f"must be at least rollout.timeout_s + {2 * CUT_S:g} = {longest:g} with "
                "rollout.weight_updates: drain, which waits for in-flight completions",
            )
        if rollout.time_share:
            rule = "must be 0 with rollout.time_share: engines cannot sample ahead while they sleep"
            self.require(self.algorithm.max_lag == 0, "algorithm.max_lag", rule)
            rule = "must be 1 with rollout.time_share: engines wake up without weights"
            self.require(self.algorithm.publish_every == 1, "algorithm.publish_every", rule)

    def _check_tiny(self) -> None:
        tiny, trainer = self.model.tiny, self.trainer
        ok = self.algorithm.keep_routing or self.algorithm.allow_unsound
        rule = "must be true for the tiny model, which is a mixture of experts"
        self.require(ok, "algorithm.keep_routing", rule)
        ok = tiny.experts % trainer.expert_parallel == 0
        rule = f"must divide model.tiny.experts = {tiny.experts}"
        self.require(ok, "trainer.expert_parallel", rule)
        ok = tiny.heads % trainer.sequence_parallel == 0 or tiny.family == "deepseek_v32"
        rule = f"must divide model.tiny.heads = {tiny.heads}"
        self.require(ok, "trainer.sequence_parallel", rule)
        rule = f"is too short for {self.max_context_source}"
        self.require(self.max_context <= tiny.max_context, "model.tiny.max_context", rule)
        for source in self.data.sources:
            source.require(
                not source.raw or tiny.cold_start.steps == 0,
                "raw",
                "needs a base model, and the cold start trains on chats. Set "
                "model.tiny.cold_start.steps: 0",
            )

    def _check_invariant(self) -> None:
        kernels = self.trainer.attention_kernels
        for knob, value, expected in (
            ("rollout.dtype", self.engine_dtype, self.model.dtype),
            ("rollout.quantization", self.rollout.quantization, ""),
            ("rollout.head_dtype", self.rollout.head_dtype, "float32"),
            ("rollout.tensor_parallel", self.rollout.tensor_parallel, 1),
            ("trainer.sequence_parallel", self.trainer.sequence_parallel, 1),
            ("trainer.expert_parallel", self.trainer.expert_parallel, 1),
            ("trainer.compile", self.trainer.compile, False),
            ("trainer.share_prompts", self.trainer.share_prompts, False),
            ("trainer.keep_attention", self.trainer.keep_attention, False),
            ("trainer.attention_kernels", kernels, kernels.replace("flash4", "torch")),
            ("trainer.hpz_partition_size", self.trainer.hpz_partition_size, 1),
            ("trainer.zero_stage", self.trainer.zero_stage, min(2, self.trainer.zero_stage)),
        ):
            rule = f"must be {expected} with model.batch_invariant"
            require(value == expected, knob, value, rule)

    def _check_budget(self, source: SourceConfig) -> None:
        budget, agents = source.budget, self.agents
        most = self.rollout.sampling.max_tokens
        rule = f"must be at most rollout.sampling.max_tokens = {most}"
        source.require(budget.max_tokens <= most, "budget.max_tokens", rule)
        if source.environment.enabled and budget.window:
            rule = f"must be at most agents.window = {self.window}"
            source.require(budget.window <= self.window, "budget.window", rule)
            turn = budget.max_tokens or most
            rule = f"must be above the {turn} tokens of a turn"
            source.require(budget.window > turn, "budget.window", rule)
            fits = agents.context != "summary" or agents.summary_tokens < budget.window // 2
            rule = f"must be more than twice agents.summary_tokens = {agents.summary_tokens}"
            source.require(fits, "budget.window", rule)

    def _check_groups(self, source: SourceConfig) -> None:
        if not self.data.weight_of(source):
            return
        algorithm, length = self.algorithm, source.length
        rewarded = any((*source.rewards.values(), length.linear, length.overlong))
        rule = f"must be none: {source.full_path()} has no rewards, so all its groups would go"
        ok = rewarded or algorithm.filter_groups != "reward"
        self.require(ok, "algorithm.filter_groups", rule)
        alone = algorithm.group_size == 1
        rule = (
            f"must be at least 2: {source.full_path()} has rewards, which are compared with those "
            "of the other completions in a group"
        )
        self.require(not (alone and rewarded), "algorithm.group_size", rule)
        rule = "must be none with algorithm.group_size: 1, because all groups would go"
        ok = not alone or algorithm.filter_groups == "none"
        self.require(ok, "algorithm.filter_groups", rule)

    def _check_agents(self) -> None:
        sampling, agents = self.rollout.sampling, self.agents
        rule = "must be empty with environments, where the chat format ends a turn"
        self.require(not sampling.stop, "rollout.sampling.stop", rule)
        ok = agents.window == 0 or agents.window > sampling.max_tokens
        rule = f"must be above rollout.sampling.max_tokens = {sampling.max_tokens}"
        self.require(ok, "agents.window", rule)
        environments = [source.environment for source in self.data.sources]
        managed = any(one.enabled and not one.program for one in environments)
        rule = "must be none: an agent program manages its context itself"
        self.require(agents.context == "none" or managed, "agents.context", rule)
        ok = agents.context != "summary" or agents.summary_tokens < self.window // 2
        rule = f"must be less than half of the window of {self.window} tokens (agents.window)"
        self.require(ok, "agents.summary_tokens", rule)

    def calls_in_thinking(self, source: SourceConfig) -> bool:
        """Return whether this source's episodes call tools inside the thinking.

        True if `system_template` is `tools-in-thinking`, or if `agents.tools_in_thinking` is set
        and the template isn't `tools`. Always False for a source without thinking.
        """
        template = source.system_template
        inside = self.agents.tools_in_thinking and template != "tools"
        thinks = source.environment.enabled and source.thinking
        return thinks and (inside or template == "tools-in-thinking")

    @property
    def with_agents(self) -> bool:
        return any(source.environment.enabled for source in self.data.sources)

    @property
    def window(self) -> int:
        """Maximum number of tokens in an episode's context window, including sampled ones."""
        return self.agents.window or self._longest_completion

    @property
    def _longest_completion(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.sampling.max_tokens

    @property
    def max_context(self) -> int:
        """Maximum sequence length in tokens: the longest prompt plus the longest completion, or a
        full context window."""
        if not self.data.sources:
            return self.sft.max_context_tokens
        agents = [source.environment.enabled for source in self.data.sources]
        longest = self._longest_completion if not (all(agents) and self.agents.window) else 0
        return max(longest, self.window if any(agents) else 0)

    @property
    def max_context_source(self) -> str:
        if not self.data.sources:
            return f"sft.max_context_tokens = {self.max_context}"
        if self.with_agents and self.agents.window == self.max_context:
            return f"agents.window = {self.max_context}"
        return f"data.max_prompt_tokens + rollout.sampling.max_tokens = {self.max_context}"

    def supervised(self) -> Config:
        """Return a copy for supervised training, with neutral RL settings (temperature 1, no
        sequence mask)."""
        return Config(
            run=self.run,
            model=self.model,
            algorithm=AlgorithmConfig(mask_delta=None),
            trainer=replace(self.trainer, share_prompts=False),
            alarms=replace(self.alarms, stop_below={}),
            sft=self.sft,
        )

    @property
    def engine_dtype(self) -> Dtype:
        return self.rollout.dtype or self.model.dtype

    def budget(self, domain: str) -> BudgetConfig:
        """Return a domain's limits with defaults filled in. Only max_sampled_tokens can still be 0,
        which means no limit."""
        limits, agents = self.data.domains[domain].budget, self.agents
        return BudgetConfig(
            max_tokens=limits.max_tokens or self.rollout.sampling.max_tokens,
            window=limits.window or self.window,
            max_turns=limits.max_turns or agents.max_turns,
            max_sampled_tokens=limits.max_sampled_tokens or agents.max_sampled_tokens,
            call_s=limits.call_s or agents.call_s,
        )

    def with_max_tokens(self, most: int) -> Config:
        sources = tuple(
            replace(each, budget=replace(each.budget, max_tokens=min(each.budget.max_tokens, most)))
            for each in self.data.sources
        )
        sampling = replace(self.rollout.sampling, max_tokens=most)
        return replace(
            self,
            data=replace(self.data, sources=sources),
            rollout=replace(self.rollout, sampling=sampling),
        )

    def in_variant(self, variant: EvalVariant) -> Config:
        config = self.with_max_tokens(variant.max_tokens) if variant.max_tokens else self
        if variant.context == "as-in-training":
            return config
        return replace(config, agents=replace(config.agents, context=variant.context))

    def check_variant(self, variant: EvalVariant) -> None:
        most, endpoint = self.rollout.sampling.max_tokens, self.endpoint
        rule = f"must be at most rollout.sampling.max_tokens = {most}"
        variant.require(variant.max_tokens <= most, "max_tokens", rule)
        told = not endpoint.base_url or endpoint.tells_thinking or variant.thinking == "as-asked"
        variant.require(told, "thinking", "needs endpoint.tells_thinking")
        used = variant.context == "as-in-training" or self.with_agents
        variant.require(used, "context", "no source has an environment")
        try:
            self.in_variant(variant)
        except ConfigError as error:
            raise ConfigError(f"{variant.full_path()}: {error}") from error

    def sampling_for(self, purpose: Literal["train", "eval"], domain: str = "") -> SamplingConfig:
        """Return the sampling parameters for training or evaluation, with the completion limit of
        `domain` if given. For limits on single turns, see `budget`."""
        most = self.budget(domain).max_tokens if domain else self.rollout.sampling.max_tokens
        sampling = replace(self.rollout.sampling, max_tokens=most)
        if purpose == "train":
            return sampling
        evaluation = self.eval
        if evaluation.temperature == 0:
            return replace(sampling, temperature=1.0, top_p=1.0, top_k=1)
        return replace(
            sampling,
            temperature=evaluation.temperature,
            top_p=evaluation.top_p,
            top_k=evaluation.top_k,
        )

    @property
    def scoring_timeout_s(self) -> float:
        """Maximum time in seconds to score a group."""
        judge = self.rewards.judge
        judging = (1 + judge.retries) * judge.timeout_s if judge.model else 0.0
        each = max(self.rewards.timeout_s, self.rewards.code.completion_s)
        return self.algorithm.group_size * each + judging

    def max_episodes(self, nodes: int = 1) -> int:
        """Maximum number of open episodes for each purpose if `nodes` nodes run environments."""
        environments = [source.environment for source in self.data.sources]
        if any(environment.program or environment.url for environment in environments):
            nodes = 1  # these run on the driver's node
        limit = min(nodes * EPISODES_PER_NODE, self.rollout.capacity)
        return self.agents.max_concurrent_episodes or max(EPISODES_PER_NODE, limit)

    @property
    def group_timeout_s(self) -> float:
        """Maximum time in seconds to wait for the next group to finish, including the time it takes
        to replace an unresponsive engine and resample its groups."""
        silent = 2 * self.rollout.silent_s
        started = self.run.startup_timeout_s + self.sending_timeout_s
        scored = self.scoring_timeout_s + BUSY_S
        return silent + started + scored + self._environment_timeout_s

    @property
    def _environment_timeout_s(self) -> float:
        """Maximum time in seconds that an environment adds to an episode: opening, replies and
        grading, plus waiting for an engine if more episodes are open than there are engine
        slots."""
        times = [
            source.environment.open_s
            + source.environment.verdict_s
            + self.budget(source.domain_name).max_turns * source.environment.reply_s
            for source in self.data.sources
            if source.environment.enabled
        ]
        waves = math.ceil(self.max_episodes() / self.rollout.capacity)
        return max(times) + waves * self.rollout.timeout_s if times else 0.0

    @property
    def sending_timeout_s(self) -> float:
        """Maximum time in seconds for a trainer rank to send weights. The rank's engines finish
        their requests at the same time but receive the weights one after another."""
        engines_per_rank = math.ceil(self.rollout.engines / self.trainer.ranks)
        return (1 + engines_per_rank) * self.rollout.update_timeout_s


AUTO_KNOBS = frozenset(marked_knobs(Config, "auto"))
"""All knobs that default to `auto`: Keel chooses their values for the hardware and the model. A
`Config` never contains `auto`. It has the schema's defaults for these knobs until
`keel.trainer.placement.layouts` (the layout on GPUs, and the precision on a CPU) replaces them."""
LAYOUT_KNOBS = AUTO_KNOBS - {DTYPE}
"""Knobs that define the layout on GPUs."""
