"""Every knob of a run. A recipe (YAML) holds only what differs from these defaults.

Each section (`configs/sections/`) checks its own ranges when it is built, and `Config` the rules
between sections, so a `Config` that exists can be run. Messages name the knob by its full path in
the recipe.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

from keel.configs.paths import template_of
from keel.configs.sections.agents import AgentsConfig, EnvironmentConfig
from keel.configs.sections.alarms import AlarmsConfig
from keel.configs.sections.algorithm import AlgorithmConfig
from keel.configs.sections.base import ConfigError, require
from keel.configs.sections.data import BudgetConfig, DataConfig, LengthConfig, SourceConfig
from keel.configs.sections.evaluation import EndpointConfig, EvalConfig, EvalVariant, FilterConfig
from keel.configs.sections.model import ColdStartConfig, Dtype, ModelConfig, TinyModelConfig
from keel.configs.sections.rewards import CodeConfig, JudgeConfig, JudgeServerConfig, RewardsConfig
from keel.configs.sections.rollout import CUT_S, RolloutConfig, SamplingConfig
from keel.configs.sections.run import RunConfig
from keel.configs.sections.sft import ConversationsConfig, SftConfig
from keel.configs.sections.trainer import TrainerConfig

__all__ = [
    "CUT_S",
    "AgentsConfig",
    "AlarmsConfig",
    "AlgorithmConfig",
    "BudgetConfig",
    "CodeConfig",
    "ColdStartConfig",
    "Config",
    "ConfigError",
    "ConversationsConfig",
    "DataConfig",
    "Dtype",
    "EndpointConfig",
    "EnvironmentConfig",
    "EvalConfig",
    "EvalVariant",
    "FilterConfig",
    "JudgeConfig",
    "JudgeServerConfig",
    "LengthConfig",
    "ModelConfig",
    "RewardsConfig",
    "RolloutConfig",
    "RunConfig",
    "SamplingConfig",
    "SftConfig",
    "SourceConfig",
    "TinyModelConfig",
    "TrainerConfig",
    "require",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A whole run."""

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

    def __post_init__(self) -> None:
        text = template_of(self.model.chat_template, "model.chat_template")
        if text != self.model.chat_template:
            object.__setattr__(self, "model", replace(self.model, chat_template=text))
        require(
            bool(self.data.sources or self.sft.sources),
            "data.sources",
            [],
            "add one (source: reasoning_gym, jsonl, file, hub or environment), or sft.sources for "
            "`keel sft` and `keel pretrain`",
        )
        held = [source.name for source in self.data.sources if source.holdout]
        for name in self.alarms.stop_below:
            require(
                name in held and self.run.eval_every > 0,
                "alarms.stop_below",
                name,
                "needs run.eval_every, and a source of this name with a holdout: "
                + (", ".join(held) or "there is none"),
            )
        self.algorithm.check_sampling(self.rollout.sampling)
        if self.rollout.colocated:
            require(
                self.rollout.engines == self.trainer.ranks,
                "rollout.engines",
                self.rollout.engines,
                f"must be trainer.ranks = {self.trainer.ranks} with rollout.colocated: one engine "
                "sits beside each rank",
            )
            require(
                self.rollout.tensor_parallel == 1,
                "rollout.tensor_parallel",
                self.rollout.tensor_parallel,
                "must be 1 with rollout.colocated: each engine sits on the GPU of one rank",
            )
        if self.model.batch_invariant:
            self._check_invariant()
        width, said = self.rollout.tensor_parallel, "must be 1 with model.residual_dtype: float32"
        require(width == 1 or not self.model.wide_residual, "rollout.tensor_parallel", width, said)
        longest = self.rollout.timeout_s + 2 * CUT_S
        ahead = self.algorithm.max_lag or self.algorithm.publish_every > 1
        if self.rollout.weight_updates == "drain" and ahead:
            require(
                self.rollout.update_timeout_s >= longest,
                "rollout.update_timeout_s",
                self.rollout.update_timeout_s,
                f"must be at least rollout.timeout_s + {2 * CUT_S:g} = {longest:g} with "
                "rollout.weight_updates: drain, which waits for running completions; or an engine "
                "that drains would be taken for dead",
            )
        if self.rollout.time_share:
            require(
                self.algorithm.max_lag == 0,
                "algorithm.max_lag",
                self.algorithm.max_lag,
                "must be 0 with rollout.time_share: engines that sleep sample nothing ahead",
            )
            require(
                self.algorithm.publish_every == 1,
                "algorithm.publish_every",
                self.algorithm.publish_every,
                "must be 1 with rollout.time_share: engines have no weights when they wake up",
            )
        if self.model.path == "tiny":
            if not self.algorithm.keep_routing and not self.algorithm.allow_unsound:
                raise ConfigError(
                    "algorithm.keep_routing = False: the tiny model is a mixture of experts, "
                    "and engine and trainer would choose different ones. Switch it on"
                )
            require(
                self.model.tiny.experts % self.trainer.expert_parallel == 0,
                "trainer.expert_parallel",
                self.trainer.expert_parallel,
                f"must divide model.tiny.experts = {self.model.tiny.experts}",
            )
            require(
                self.model.tiny.heads % self.trainer.sequence_parallel == 0,
                "trainer.sequence_parallel",
                self.trainer.sequence_parallel,
                f"must divide model.tiny.heads = {self.model.tiny.heads}",
            )
            if self.max_context > self.model.tiny.max_context:
                raise ConfigError(
                    f"model.tiny.max_context = {self.model.tiny.max_context}: too short "
                    f"for {self.max_context_said}"
                )
        for source in self.data.sources:
            self._check_budget(source)
            taught = self.model.path == "tiny" and self.model.tiny.cold_start.steps > 0
            require(
                not (source.raw and taught),
                f"data.sources[{source.name}].raw",
                source.raw,
                "is for base models: the tiny one is taught chats; leave it out, or set "
                "model.tiny.cold_start.steps: 0",
            )
        if self.with_agents:
            self._check_agents()

    def _check_invariant(self) -> None:
        """Nothing else that computes in another order."""
        kernels = self.trainer.attention_kernels
        for knob, value, wanted in (
            ("rollout.dtype", self.engine_dtype, self.model.dtype),
            ("rollout.head_dtype", self.rollout.head_dtype, "float32"),
            ("rollout.tensor_parallel", self.rollout.tensor_parallel, 1),
            ("trainer.sequence_parallel", self.trainer.sequence_parallel, 1),
            ("trainer.compile", self.trainer.compile, False),
            ("trainer.share_prompts", self.trainer.share_prompts, False),
            ("trainer.keep_attention", self.trainer.keep_attention, False),
            ("trainer.attention_kernels", kernels, kernels.replace("flash4", "torch")),
            ("trainer.zero_stage", self.trainer.zero_stage, min(2, self.trainer.zero_stage)),
        ):
            require(value == wanted, knob, value, f"must be {wanted} with model.batch_invariant")

    def _check_budget(self, source: SourceConfig) -> None:
        """Engines have room, and deadlines time, for what the run's own knobs say."""
        own, knob = source.budget, f"data.sources[{source.name}].budget"
        most = self.rollout.sampling.max_tokens
        require(
            own.max_tokens <= most,
            f"{knob}.max_tokens",
            own.max_tokens,
            f"must be at most rollout.sampling.max_tokens = {most}; raise that",
        )
        if not source.environment.given:
            return
        require(
            own.window <= self.window,
            f"{knob}.window",
            own.window,
            f"must be at most agents.window = {self.window}; raise that",
        )
        turn = own.max_tokens or most
        require(
            own.window == 0 or own.window > turn,
            f"{knob}.window",
            own.window,
            f"must be above the {turn} tokens of a turn, which needs a context before it; raise it "
            f"or lower {knob}.max_tokens",
        )
        summary = self.agents.summary_tokens
        require(
            own.window == 0 or self.agents.context != "summary" or summary < own.window // 2,
            f"{knob}.window",
            own.window,
            f"must be more than twice agents.summary_tokens = {summary}, with agents.context: "
            "summary",
        )

    def _check_agents(self) -> None:
        sampling, agents = self.rollout.sampling, self.agents
        require(
            not sampling.stop,
            "rollout.sampling.stop",
            list(sampling.stop),
            "a turn ends where the chat format says so; leave it empty with environments",
        )
        require(
            agents.window == 0 or agents.window > sampling.max_tokens,
            "agents.window",
            agents.window,
            f"must be above rollout.sampling.max_tokens = {sampling.max_tokens}: a turn needs a "
            "context before it",
        )
        require(
            agents.context == "none"
            or any(s.environment.given and not s.environment.program for s in self.data.sources),
            "agents.context",
            agents.context,
            "must be none: an agent program manages its context itself",
        )
        require(
            agents.context != "summary" or agents.summary_tokens < self.window // 2,
            "agents.summary_tokens",
            agents.summary_tokens,
            f"must be less than half of the window of {self.window} tokens (agents.window)",
        )
        for source in self.data.sources:
            if agents.tools_in_thinking:
                require(
                    source.thinking or not source.environment.given,
                    f"data.sources[{source.name}].thinking",
                    source.thinking,
                    "must be true with agents.tools_in_thinking, which leaves no tool without it",
                )
            require(
                agents.tools_in_thinking or source.system_template != "tools-in-thinking",
                f"data.sources[{source.name}].system_template",
                source.system_template,
                "asks for what agents.tools_in_thinking does; switch that on, or choose tools",
            )

    @property
    def with_agents(self) -> bool:
        """Whether any source has an environment."""
        return any(source.environment.given for source in self.data.sources)

    @property
    def window(self) -> int:
        """Tokens of a context in an environment, with what is sampled after it."""
        return self.agents.window or self._longest_completion

    @property
    def _longest_completion(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.sampling.max_tokens

    @property
    def max_context(self) -> int:
        """Longest sequence that engines and trainer meet, in tokens: prompt and completion at their
        limits, or a full window."""
        if not self.data.sources:
            return self.sft.max_context_tokens
        plain = any(not source.environment.given for source in self.data.sources)
        longest = self._longest_completion if plain or not self.agents.window else 0
        return max(longest, self.window if self.with_agents else 0)

    @property
    def max_context_said(self) -> str:
        """`max_context` with the knobs that it comes from."""
        if not self.data.sources:
            return f"sft.max_context_tokens = {self.max_context}"
        if self.with_agents and self.agents.window == self.max_context:
            return f"agents.window = {self.max_context}"
        return f"data.max_prompt_tokens + rollout.sampling.max_tokens = {self.max_context}"

    def supervised(self, steps: int) -> Config:
        """What a supervised run of so many steps depends on, and nothing else: no prompts are
        sampled, so probabilities are those of temperature 1, and there is no sequence mask."""
        return Config(
            run=replace(self.run, steps=steps),
            model=self.model,
            algorithm=AlgorithmConfig(mask_delta=None),
            trainer=replace(self.trainer, share_prompts=False),
            alarms=replace(self.alarms, stop_below={}),
            sft=self.sft,
        )

    @property
    def engine_dtype(self) -> Dtype:
        """Precision of the engines, and of the weights that they are sent."""
        return self.rollout.dtype or self.model.dtype

    def budget(self, domain: str) -> BudgetConfig:
        """What a completion or a trajectory of a domain may take: nothing in it is 0 but
        max_sampled_tokens, for no further limit."""
        own, agents = self.data.budgets_by_domain[domain], self.agents
        return BudgetConfig(
            max_tokens=own.max_tokens or self.rollout.sampling.max_tokens,
            window=own.window or self.window,
            max_turns=own.max_turns or agents.max_turns,
            max_sampled_tokens=own.max_sampled_tokens or agents.max_sampled_tokens,
            call_s=own.call_s or agents.call_s,
        )

    def with_max_tokens(self, most: int) -> Config:
        """With completions and turns of at most so many tokens, in every domain."""
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

    def sampling(self, purpose: Literal["train", "eval"], domain: str = "") -> SamplingConfig:
        """How completions are sampled that are for `purpose`; domain: within whose budget (turns
        have theirs from `budget`)."""
        most = self.budget(domain).max_tokens if domain else self.rollout.sampling.max_tokens
        asked = replace(self.rollout.sampling, max_tokens=most)
        if purpose == "train":
            return asked
        measured = self.eval
        if measured.temperature == 0:
            return replace(asked, temperature=1.0, top_p=1.0, top_k=1)
        return replace(
            asked,
            temperature=measured.temperature,
            top_p=measured.top_p,
            top_k=measured.top_k,
        )

    @property
    def scoring_timeout_s(self) -> float:
        """Longest that scoring a group may take, in seconds, once it has begun."""
        judge = self.rewards.judge
        asking = (1 + judge.retries) * judge.timeout_s if judge.model else 0.0
        each = max(self.rewards.timeout_s, self.rewards.code.completion_s)
        return self.algorithm.group_size * each + asking

    @property
    def group_timeout_s(self) -> float:
        """Longest time without a group, in seconds, when all is well or repaired: an engine has
        fallen silent and is replaced, and its groups are sampled again and scored."""
        silent = 2 * self.rollout.silent_s
        started = self.run.startup_timeout_s + self.sending_timeout_s
        return silent + started + self.scoring_timeout_s + self._environment_timeout_s

    @property
    def _environment_timeout_s(self) -> float:
        """Longest that an environment may take beside engines: to open, with its tools (within
        `rollout.timeout_s`), to reply and to grade. Where more are open than engines have room
        for, their turns wait for each other."""
        own = [
            source.environment.open_s
            + source.environment.verdict_s
            + self.budget(source.domain_name).max_turns * source.environment.reply_s
            for source in self.data.sources
            if source.environment.given
        ]
        room = self.rollout.engines * self.rollout.max_num_seqs
        waves = math.ceil(self.agents.max_concurrent_episodes / room)
        return max(own) + waves * self.rollout.timeout_s if own else 0.0

    @property
    def sending_timeout_s(self) -> float:
        """Longest that a rank of the trainer may be busy with new weights, in seconds: its engines
        finish what they are doing, all at once, and then get them one after the other."""
        engines_per_rank = math.ceil(self.rollout.engines / self.trainer.ranks)
        return (1 + engines_per_rank) * self.rollout.update_timeout_s
