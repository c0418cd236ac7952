"""Bounds of single knobs and rules between knobs."""

import re
import sys
from dataclasses import MISSING, fields, is_dataclass, replace
from typing import Any, get_args

import pytest

from keel.configs import schema, synthesis
from keel.configs.schema import (
    AgentsConfig,
    AlgorithmConfig,
    BudgetConfig,
    CodeConfig,
    Config,
    ConfigError,
    ConversationsConfig,
    DataConfig,
    EnvironmentConfig,
    EvalConfig,
    JudgeConfig,
    JudgeServerConfig,
    LengthConfig,
    LoraConfig,
    ModelConfig,
    RewardsConfig,
    RolloutConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
    TinyModelConfig,
    TrainerConfig,
)
from keel.configs.sections.base import knob_types
from keel.trainer.build_agents import budget
from keel.trainer.prepare import length_rules

SHOP = EnvironmentConfig(target="shop:Shop")
SUMS = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10)
URL = "http://localhost:8000/v1"


def shop(name: str = "shop", **options: Any) -> SourceConfig:
    defaults = {"source": "environment", "environment": SHOP, "size": 8, "holdout": 2}
    return SourceConfig(name=name, **{**defaults, **options})


def config(*sources: SourceConfig, path: str = "some/model", **sections: Any) -> Config:
    defaults: dict[str, Any] = {
        "model": ModelConfig(path=path, dtype="float32"),
        "data": DataConfig(sources=sources or (SUMS,), max_prompt_tokens=64),
        "rollout": RolloutConfig(sampling=SamplingConfig(max_tokens=100)),
    }
    return Config(**{**defaults, **sections})


def agentic(*sources: SourceConfig, stop: tuple[str, ...] = (), **agents: Any) -> Config:
    sampling = SamplingConfig(max_tokens=100, stop=stop)
    return config(
        *(sources or (shop(),)),
        rollout=RolloutConfig(sampling=sampling),
        agents=AgentsConfig(**agents),
    )


def algorithmic(top_p: float = 1.0, **algorithm: Any) -> Config:
    sampling = SamplingConfig(top_p=top_p, top_k=64 if top_p < 1 else 0)
    return config(
        path="tiny",
        rollout=RolloutConfig(sampling=sampling),
        algorithm=AlgorithmConfig(**algorithm),
    )


def test_every_section_with_bounds_checks_them() -> None:
    author = {"base_url": URL, "model": "a"}
    source = {"name": "a", "source": "jsonl", "path": "a"}
    writer = synthesis.AuthorConfig(**author)  # type: ignore[arg-type]
    needed: dict[str, dict[str, Any]] = {
        "SourceConfig": source,
        "ConversationsConfig": source,
        "EvalVariant": {"name": "a"},
        "CodeSourceConfig": {"name": "a", "git": "a"},
        "AuthorConfig": author,
        "SynthesisConfig": {"family": "general", "dir": "a", "author": writer},
    }
    classes = {v for m in (schema, synthesis) for v in vars(m).values() if is_dataclass(v)}
    checked = 0
    for cls in classes:
        for field in fields(cls):
            if not (bounds := field.metadata.get("bounds")):
                continue
            low = bounds["gt"] if "gt" in bounds else bounds["ge"] - 1
            with pytest.raises(ConfigError, match=rf"\b{field.name} = "):
                cls(**{**needed.get(cls.__name__, {}), field.name: low})  # type: ignore[operator]
            checked += 1
    assert checked > 150


@pytest.mark.parametrize(
    ("section", "options", "knob"),
    [
        (RunConfig, {"nodes": 2}, "run.nodes"),
        (TrainerConfig, {"ranks": 3, "expert_parallel": 2}, "trainer.expert_parallel"),
        (TrainerConfig, {"ranks": 4, "hpz_partition_size": 2}, "trainer.hpz_partition_size"),
        (
            TrainerConfig,
            {"ranks": 4, "zero_stage": 3, "hpz_partition_size": 2, "expert_parallel": 2},
            "trainer.hpz_partition_size",
        ),
        (TrainerConfig, {"min_ranks": 2}, "trainer.min_ranks"),
        (TrainerConfig, {"offload_optimizer": True}, "trainer.offload_optimizer"),
        (TrainerConfig, {"compile": True, "zero_stage": 3}, "trainer.compile"),
        (TrainerConfig, {"attention": "warm-up", "indexer_loss": 0.0}, "trainer.indexer_loss"),
        (SamplingConfig, {"top_p": 0.9}, "rollout.sampling.top_k"),
        (SamplingConfig, {"temperature": 0.005}, "rollout.sampling.temperature"),
        (EvalConfig, {"temperature": 0.0, "samples": 4}, "eval.samples"),
        (EvalConfig, {"pass_at": (2,)}, "eval.pass_at"),
        (TinyModelConfig, {"hidden_size": 33}, "model.tiny.hidden_size"),
        (TinyModelConfig, {"experts_per_token": 9}, "model.tiny.experts_per_token"),
        (ModelConfig, {"batch_invariant": True}, "model.batch_invariant"),
        (RewardsConfig, {"workers": 10**8}, "rewards.workers"),
        (CodeConfig, {"time_s": 1e300}, "rewards.code.time_s"),
        (JudgeConfig, {"serve": True}, "rewards.judge.model"),
        (JudgeConfig, {"base_url": "http://[::1", "model": "m"}, "rewards.judge.base_url"),
        (JudgeConfig, {"base_url": f"{URL},{URL}2", "model": "m"}, "rewards.judge.base_url"),
        (JudgeConfig, {"base_url": f"{URL} {URL}", "model": "m"}, "rewards.judge.base_url"),
        (JudgeServerConfig, {"options": {"tensor-parallel-size": 2}}, "judge.server.options"),
        (EnvironmentConfig, {"target": "a:B", "url": "http://x"}, "environment.target"),
        (EnvironmentConfig, {"program": "agent", "on_crash": "zero"}, "environment.on_crash"),
        (EnvironmentConfig, {"target": "a:B", "tells_reward": True}, "environment.tells_reward"),
        (shop, {"environment": EnvironmentConfig()}, "data.sources[shop].environment"),
        (shop, {"size": 0}, "data.sources[shop].size"),
        (shop, {"task": "gcd"}, "data.sources[shop].task"),
    ],
)
def test_conflicting_knobs_are_refused(section: Any, options: dict[str, Any], knob: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{knob} = ")):
        section(**options)


SOURCE_KNOBS = [
    (section, field)
    for section in (SourceConfig, ConversationsConfig)
    for field in fields(section)
    if field.metadata.get("kinds")
]


@pytest.mark.parametrize(
    ("section", "field"), SOURCE_KNOBS, ids=lambda one: getattr(one, "name", None)
)
def test_knobs_of_other_kinds_of_sources_are_refused(section: Any, field: Any) -> None:
    others = {"jsonl": "path", "reasoning_gym": "task", "text": "path"}
    kinds = get_args(knob_types(section)["source"])
    source = next(one for one in others if one in kinds and one not in field.metadata["kinds"])
    default = {} if field.default is MISSING else field.default
    value = {dict: {"a": "b"}, str: "skip", bool: True, int: 5, float: 0.5}[type(default)]
    with pytest.raises(ConfigError, match=rf"\[a\]\.{field.name} = .*belongs to source: "):
        section(**{"name": "a", "source": source, others[source]: "a", field.name: value})


def test_missing_replay_is_refused_unless_allowed() -> None:
    for knob, top_p in (("keep_routing", 1.0), ("keep_sampling_mask", 0.9)):
        with pytest.raises(ConfigError, match=f"algorithm.{knob} = False"):
            algorithmic(top_p, **{knob: False})
        assert not getattr(algorithmic(top_p, **{knob: False}, allow_unsound=True).algorithm, knob)


def test_time_sharing_excludes_sampling_ahead() -> None:
    for knob in ("max_lag", "publish_every"):
        recipe = config(algorithm=AlgorithmConfig(**{knob: 2}))
        with pytest.raises(ConfigError, match=f"algorithm.{knob} = 2"):
            replace(recipe, rollout=replace(recipe.rollout, time_share=True))


NO_REWARD = {"correct": 0.0, "format": 0.0}


def test_training_sources_need_a_gradient() -> None:
    idle = replace(SUMS, name="idle", rewards=NO_REWARD, holdout=2)
    for changes in (
        {"rewards": {"correct": 0.0, "format": -0.1}},
        {"kl_coef": 0.01},
        {"length": LengthConfig(linear=0.1)},
        {"length": LengthConfig(overlong=0.1)},
        {"weight": 0.0},
    ):
        other = replace(idle, name="other", **changes)
        assert DataConfig(sources=(SUMS, other)).weight_of(other) == other.weight
    with pytest.raises(ConfigError, match=r"sources\[idle\]\.rewards = "):
        DataConfig(sources=(other, SUMS, idle))
    DataConfig(sources=(SUMS, idle), train_on=("sums",))


def test_greedy_sampling_is_refused_in_training() -> None:
    greedy = SamplingConfig(top_k=1)
    with pytest.raises(ConfigError, match=r"^rollout\.sampling\.top_k = 1: "):
        config(rollout=RolloutConfig(sampling=greedy))


SECOND_COPY = {"ranks": 2, "zero_stage": 3, "hpz_partition_size": 2}


def test_lora_has_no_second_copy_of_parameters() -> None:
    adapters = ModelConfig(path="a/model", lora=LoraConfig(rank=4))
    with pytest.raises(ConfigError, match=r"^trainer\.hpz_partition_size = 2: .*model\.lora"):
        config(model=adapters, trainer=TrainerConfig(**SECOND_COPY))


def test_groups_fit_the_rewards() -> None:
    taught = replace(SUMS, rewards={"correct": 0.0}, kl_coef=1.0, teacher="a/teacher")
    config(taught, algorithm=AlgorithmConfig(filter_groups="correct"))
    config(taught, algorithm=AlgorithmConfig(group_size=1))
    for source, size, filtered, rule in (
        (taught, 2, "reward", r"^algorithm\.filter_groups = 'reward': must be none"),
        (taught, 1, "correct", r"^algorithm\.filter_groups = 'correct': must be none"),
        (SUMS, 1, "none", r"^algorithm\.group_size = 1: must be at least 2.*sums.* has rewards"),
    ):
        with pytest.raises(ConfigError, match=rule):
            config(source, algorithm=AlgorithmConfig(group_size=size, filter_groups=filtered))


def test_batch_invariance_refuses_other_orders() -> None:
    invariant = config(model=ModelConfig(path="a/model", batch_invariant=True))
    for section, knob, options in (
        (RolloutConfig, "rollout.dtype", {"dtype": "float16"}),
        (RolloutConfig, "rollout.quantization", {"quantization": "fp8"}),
        (RolloutConfig, "rollout.head_dtype", {"head_dtype": "model"}),
        (RolloutConfig, "rollout.tensor_parallel", {"tensor_parallel": 2}),
        (TrainerConfig, "trainer.sequence_parallel", {"ranks": 2, "sequence_parallel": 2}),
        (TrainerConfig, "trainer.expert_parallel", {"ranks": 2, "expert_parallel": 2}),
        (TrainerConfig, "trainer.compile", {"compile": True}),
        (TrainerConfig, "trainer.hpz_partition_size", SECOND_COPY),
        (TrainerConfig, "trainer.zero_stage", {"zero_stage": 3}),
        (TrainerConfig, "trainer.share_prompts", {"share_prompts": True}),
        (TrainerConfig, "trainer.keep_attention", {"keep_attention": True}),
        (TrainerConfig, "trainer.attention_kernels", {"attention_kernels": "flash4"}),
    ):
        changes = {knob.partition(".")[0]: section(**options)}
        with pytest.raises(ConfigError, match=rf"^{re.escape(knob)} = "):
            replace(invariant, **changes)


def test_engines_are_quantised_and_split_only_where_possible() -> None:
    def with_rollout(**rollout: Any) -> Config:
        half = ModelConfig(path="a/model", dtype="bfloat16")
        return config(model=half, rollout=RolloutConfig(**rollout))

    quantised = with_rollout(quantization="fp8")
    with_rollout(tensor_parallel=2, expert_parallel=True)
    for knob, refused in {
        "rollout.tensor_parallel": lambda: with_rollout(expert_parallel=True),
        "rollout.quantization": lambda: with_rollout(quantization="fp8", dtype="float32"),
    }.items():
        with pytest.raises(ConfigError, match=rf"^{re.escape(knob)} = "):
            refused()
    for model in ({"dtype": "float32"}, {"residual_dtype": "float32"}):
        with pytest.raises(ConfigError, match=r"^rollout\.quantization = "):
            replace(quantised, model=ModelConfig(path="a/model", **model))


def test_agent_limits_must_leave_room() -> None:
    for knob, agents in {
        "agents.window": {"window": 100},
        "agents.summary_tokens": {"context": "summary"},
        "rollout.sampling.stop": {"stop": ("x",)},
    }.items():
        with pytest.raises(ConfigError, match=f"{knob} = "):
            agentic(**agents)  # type: ignore[arg-type]


def test_limit_of_episodes_grows_with_nodes_up_to_what_engines_sample() -> None:
    rollout = RolloutConfig(engines=8, max_num_seqs=100)
    recipe = config(shop(), rollout=rollout)
    assert [recipe.max_episodes(nodes) for nodes in (1, 3, 9)] == [256, 768, 800]
    bounded = replace(recipe, agents=AgentsConfig(max_concurrent_episodes=40))
    assert bounded.max_episodes(9) == 40
    server = replace(SHOP, target="", url="http://tools")
    for on_driver in (replace(SHOP, program="solve.py"), server):
        source = shop(environment=on_driver, source="jsonl", path="a.jsonl")
        assert config(source, rollout=rollout).max_episodes(9) == 256


def test_sources_decide_whether_tools_are_called_inside_thinking() -> None:
    def inside(*sources: SourceConfig, **agents: Any) -> list[bool]:
        config = agentic(*sources, **agents)
        return [config.calls_in_thinking(source) for source in config.data.sources]

    marked = (shop(system_template="tools-in-thinking"), shop("plain", system_template="tools"))
    sources = (*marked, shop("none"), shop("silent", thinking=False), SUMS)
    assert inside(*sources) == [True, False, False, False, False]
    assert inside(*sources, tools_in_thinking=True) == [True, False, True, False, False]


def test_window_determines_the_context() -> None:
    assert agentic().max_context == agentic().window == 164
    wide = agentic(window=4096)
    assert wide.max_context == 4096 and "agents.window" in wide.max_context_source
    assert agentic(shop(), SUMS, window=120).max_context == 164
    assert agentic(SUMS, window=4096).max_context == 164, "no source has an environment"
    with pytest.raises(ConfigError, match=r"model\.tiny\.max_context = 512"):
        replace(agentic(window=600), model=ModelConfig(dtype="float32"))


def test_sequence_parallelism_divides_heads_except_with_sparse_attention() -> None:
    trainer = TrainerConfig(ranks=3, sequence_parallel=3)
    tiny = TinyModelConfig(family="deepseek_v32")
    config(model=ModelConfig(dtype="float32", tiny=tiny), trainer=trainer)
    with pytest.raises(ConfigError, match=r"must divide model\.tiny\.heads = 4"):
        config(path="tiny", trainer=trainer)


OWN = {"max_tokens": 40, "window": 200, "max_turns": 30, "max_sampled_tokens": 90, "call_s": 650.0}


def budgeted(*sources: SourceConfig, **data: Any) -> Config:
    return config(
        data=DataConfig(sources=sources, max_prompt_tokens=64, **data),
        agents=AgentsConfig(window=400, max_turns=5, call_s=60.0),
    )


def test_domain_budgets_replace_the_runs_limits() -> None:
    short_sums = replace(SUMS, budget=BudgetConfig(max_tokens=20))
    recipe = budgeted(shop(budget=BudgetConfig(**OWN)), shop("other"), short_sums)  # type: ignore[arg-type]
    first, second = (budget(recipe, source) for source in recipe.data.sources[:2])
    assert (first.turn_tokens, first.window, first.turns) == (40, 200, 30)
    assert (first.tokens, first.call_s) == (90, 650.0)
    assert (second.turn_tokens, second.window, second.turns) == (100, 400, 5)
    assert (second.tokens, second.call_s) == (sys.maxsize, 60.0)
    limits = {name: rule.limit for name, rule in length_rules(recipe).items()}
    assert limits == {"shop": 90, "other": 400, "sums": 20}
    for purpose in ("train", "eval"):
        most = {name: recipe.sampling_for(purpose, name).max_tokens for name in limits}
        assert most == {"shop": 40, "other": 100, "sums": 20}
    assert recipe.group_timeout_s > budgeted(shop()).group_timeout_s
    capped = recipe.with_max_tokens(30)
    assert [capped.budget(name).max_tokens for name in sorted(limits)] == [30, 30, 20]


def test_impossible_budgets_are_refused() -> None:
    for domain, options, knob in (
        ("sums", {"max_turns": 3}, "budget.max_turns = 3"),
        ("sums", {"max_tokens": 101}, "budget.max_tokens = 101"),
        ("two", {"window": 401}, "budget.window = 401"),
        ("two", {"window": 100}, "budget.window = 100"),
        ("shop", {"max_turns": 2}, "sources[two].budget"),
    ):
        own = BudgetConfig(**options)
        with pytest.raises(ConfigError, match=re.escape(knob)):
            tight = shop("two", domain=domain) if domain != "sums" else SUMS
            budgeted(shop(), replace(tight, budget=own))


def test_train_on_leaves_the_others_for_evaluation() -> None:
    recipe = budgeted(shop(weight=3), SUMS, train_on=("sums",))
    assert [recipe.data.weight_of(source) for source in recipe.data.sources] == [0, 1]
    assert [source.weight for source in recipe.data.sources] == [3, 1]
    idle = (shop(weight=0), replace(SUMS, holdout=1))
    for sources, train_on in (((shop(), SUMS), "sum"), ((shop(), SUMS), "shop"), (idle, "shop")):
        with pytest.raises(ConfigError, match=r"data\.(train_on|sources)"):
            budgeted(*sources, train_on=(train_on,))


def test_judge_must_be_set_exactly_when_needed() -> None:
    served = JudgeConfig(model="m", serve=True, server=JudgeServerConfig(tensor_parallel=2))
    assert (served.gpus, JudgeConfig(base_url=URL, model="m").gpus) == (2, 0)
    served.check_used(judged=True, gpu=True)
    JudgeConfig().check_used(judged=False, gpu=False)
    for judge, judged, gpu, knob in (
        (JudgeConfig(), True, True, "base_url"),
        (served, False, True, "serve"),
        (served, True, False, "tensor_parallel"),
    ):
        with pytest.raises(ConfigError, match=knob):
            judge.check_used(judged=judged, gpu=gpu)


@pytest.mark.parametrize("indexer_lr", [0.0, 7e-6])
def test_indexers_have_their_own_rate_and_schedule(indexer_lr: float) -> None:
    # 3e-6 · x / 3e-6 would exceed x by rounding.
    plain = TrainerConfig(lr=3e-6, min_lr=3e-6, schedule="cosine", indexer_lr=indexer_lr)
    own = plain.of_indexers
    assert own.lr == own.min_lr == (indexer_lr or 3e-6)
    assert own.schedule == "cosine"
    assert replace(plain, indexer_schedule="linear").of_indexers.schedule == "linear"
