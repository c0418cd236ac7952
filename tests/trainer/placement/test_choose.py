"""What is chosen for five shapes on three sizes of GPUs: nothing that fits is refused, what a
recipe says stays, and a CPU changes nothing."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from benchmarks.common import QWEN3_06B, QWEN3_8B, QWEN3_17B, QWEN3_30B_A3B, Mixture
from keel.configs.auto import KNOBS
from keel.configs.diff import flatten_config
from keel.configs.schema import (
    AlgorithmConfig,
    Config,
    ConfigError,
    DataConfig,
    ModelConfig,
    RolloutConfig,
    SamplingConfig,
    SftConfig,
    SourceConfig,
    TrainerConfig,
)
from keel.configs.sections.sft import ConversationsConfig
from keel.model.load import ModelFacts, facts_of
from keel.trainer.placement.choose import CACHED, choose
from keel.trainer.placement.hardware import Hardware, idle_nodes, place
from keel.trainer.placement.layouts import with_values
from keel.trainer.placement.plan import make_plan

SHAPES = {
    "0.6b": QWEN3_06B,
    "1.7b": QWEN3_17B,
    "8b": QWEN3_8B,
    "1.4b-a0.4b": Mixture().config(),
    "30b-a3b": QWEN3_30B_A3B,
}
SIZES, COUNTS = (139.0, 79.0, 23.0), (1, 4, 8)
SOURCE = SourceConfig(name="sums", source="reasoning_gym", task="chain_sum", size=10, kl_coef=0.02)


@pytest.fixture(scope="module")
def shapes() -> dict[str, ModelFacts]:
    return {name: replace(facts_of(one), max_context=40_960) for name, one in SHAPES.items()}


@pytest.fixture
def quick_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would help is searched for a second or so, and has tests of its own."""
    monkeypatch.setattr("keel.trainer.placement.suggestions.TRIED", 1)
    monkeypatch.setattr("keel.trainer.placement.layouts.SUGGESTIONS_TRIED", 1)


def recipe(*, dtype: Any = "bfloat16", **algorithm: Any) -> Config:
    """The workload of docs/performance.md."""
    sizes: dict[str, Any] = {"prompts_per_step": 16, "group_size": 8, **algorithm}
    return Config(
        model=ModelConfig(path="some/model", dtype=dtype),
        data=DataConfig(sources=(SOURCE,), max_prompt_tokens=128),
        rollout=RolloutConfig(sampling=SamplingConfig(top_p=0.95, top_k=512, max_tokens=1024)),
        algorithm=AlgorithmConfig(**sizes),
    )


def machine(gpus: int, gib: float, **more: Any) -> Hardware:
    return Hardware(gpu=True, nodes=tuple(idle_nodes(1, gpus)), gpu_gib=gib, note="x", **more)


def some_layout_fits(config: Config, facts: ModelFacts, hardware: Hardware) -> bool:
    """By trying all that may need the least memory, whoever would choose it."""
    gpus = sum(node.gpus for node in hardware.nodes)
    beside = [(n, n, True) for n in range(1, gpus + 1)]
    apart = [(n, gpus - n, False) for n in range(1, gpus)]
    shares = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05)
    for (ranks, engines, colocated), stage in product([*beside, *apart], (1, 2, 3)):
        seats = {"trainer.ranks": ranks, "rollout.engines": engines, "rollout.colocated": colocated}
        for share, sleep, away in product(shares, (True, False), (True, False)):
            least = {
                **seats,
                "rollout.gpu_memory_utilization": share,
                "rollout.time_share": sleep and (colocated or gpus == 1),
                "rollout.max_num_seqs": 1,
                "trainer.zero_stage": stage,
                "trainer.offload_optimizer": away,
                "trainer.activation_checkpointing": True,
                "trainer.micro_batch_tokens": 1152,
            }
            try:
                changed = with_values(config, least)
                shared = place(changed, hardware.idle).shared
                make_plan(changed, facts, gpu=True, gpu_gib=hardware.gpu_gib, shared=shared)
            except ConfigError:
                continue
            return True
    return False


@pytest.mark.usefixtures("quick_refusals")
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_that_fits_is_refused_and_what_is_chosen_fits(
    shape: str, shapes: dict[str, ModelFacts]
) -> None:
    config, refused = recipe(), 0
    for gpus, gib in product(COUNTS, SIZES):
        hardware = machine(gpus, gib)
        try:
            choice = choose(config, KNOBS, shapes[shape], hardware)
        except ConfigError as error:
            refused += 1
            assert not some_layout_fits(config, shapes[shape], hardware), (gpus, gib)
            assert "GiB" in str(error), error
            continue
        shared = place(choice.config, hardware.idle).shared
        make_plan(choice.config, shapes[shape], gpu=True, gpu_gib=gib, shared=shared)
        assert set(choice.values) == set(choice.reasons) == KNOBS
        assert all(choice.reasons.values())
        if shape in ("0.6b", "1.7b", "1.4b-a0.4b"):  # small: on all GPUs, at the measured sizes
            assert choice.config.trainer.ranks == gpus
            assert choice.config.trainer.micro_batch_tokens >= 8192
    assert refused == {"8b": 1, "30b-a3b": 4}.get(shape, 0)


def test_a_small_model_is_not_asked_to_share_what_it_need_not(
    shapes: dict[str, ModelFacts],
) -> None:
    """The case that used to be refused: an engine took 0.85 of a GPU and needed 0.07."""
    choice = choose(recipe(), KNOBS, shapes["0.6b"], machine(1, 139.0))
    config = choice.config
    assert config.rollout.gpu_memory_utilization < 0.25 and not config.rollout.time_share
    assert config.trainer.compile and not config.trainer.activation_checkpointing
    assert config.trainer.micro_batch_tokens >= 17_280
    lines = choice.lines()
    assert any(line.startswith("trainer.micro_batch_tokens = ") for line in lines)
    assert "rollout.time_share = false: engine and trainer fit side by side" in lines
    # In three steps, what compiling takes at their start is not won back.
    few = replace(recipe(), run=replace(recipe().run, steps=3))
    assert not choose(few, KNOBS, shapes["0.6b"], machine(1, 139.0)).config.trainer.compile


@pytest.mark.parametrize(
    "values",
    [
        {"rollout.gpu_memory_utilization": 0.5},
        {"trainer.micro_batch_tokens": 5000},
        {"rollout.time_share": True, "trainer.offload_while_sampling": True},
        {"trainer.activation_checkpointing": True, "trainer.compile": False},
        {"trainer.zero_stage": 2, "trainer.offload_optimizer": True},
        {"rollout.max_num_seqs": 7},
        {"trainer.ranks": 3, "rollout.engines": 1},
        {"rollout.colocated": False},
    ],
)
def test_what_a_recipe_says_stays(values: dict[str, Any], shapes: dict[str, ModelFacts]) -> None:
    said = with_values(recipe(), values)
    choice = choose(said, KNOBS - set(values), shapes["1.7b"], machine(4, 139.0))
    flat = flatten_config(choice.config)
    assert {knob: flat[knob] for knob in values} == values
    assert not set(values) & set(choice.values)


def test_a_value_that_goes_with_no_layout_is_refused_with_the_reason(
    shapes: dict[str, ModelFacts],
) -> None:
    def refusal(**values: Any) -> str:
        said = {name.replace("__", "."): value for name, value in values.items()}
        left = KNOBS - set(said)
        with pytest.raises(ConfigError) as raised:
            choose(with_values(recipe(), said), left, shapes["1.7b"], machine(1, 23.0))
        return str(raised.value)

    text = refusal(trainer__micro_batch_tokens=2_000_000)
    assert text.startswith("a trainer rank needs ") and "activations" in text
    assert "To make it fit: trainer.micro_batch_tokens=" in text
    assert "rollout.gpu_memory_utilization = 0.02" in refusal(rollout__gpu_memory_utilization=0.02)
    with pytest.raises(ConfigError, match="time_share"):
        values = {"rollout.time_share": True, "rollout.colocated": False}
        said = with_values(recipe(), values)
        choose(said, KNOBS - set(values), shapes["1.7b"], machine(4, 139.0))


def test_nothing_is_offloaded_without_need(shapes: dict[str, ModelFacts]) -> None:
    seen = set[bool]()
    for name, gpus, gib in (
        ("1.7b", 1, 79.0),
        ("8b", 4, 139.0),
        ("8b", 8, 79.0),
        ("1.4b-a0.4b", 1, 79.0),
        ("1.7b", 1, 40.0),
        ("8b", 2, 139.0),
    ):
        choice = choose(recipe(), KNOBS, shapes[name], machine(gpus, gib))
        waits, trainer = choice.plan.offload, choice.config.trainer
        needed = waits.sampling + waits.training > 0
        assert choice.plan.peak <= choice.plan.trainer.total
        if choice.config.rollout.time_share:
            assert trainer.offload_while_sampling == needed, (name, gpus, gib, waits)
            seen.add(needed)
        if waits.training and not waits.sampling:
            assert "activations have no room" in choice.reasons["trainer.offload_while_sampling"]
    assert seen == {True, False}


def test_what_does_not_fit_at_once_is_sampled_in_equal_waves(
    shapes: dict[str, ModelFacts],
) -> None:
    large, facts = recipe(prompts_per_step=32), shapes["0.6b"]
    whole = choose(large, KNOBS, facts, machine(1, 79.0))
    assert whole.config.rollout.max_num_seqs == 256
    assert "in a step" in whole.reasons["rollout.max_num_seqs"]
    halves = choose(large, KNOBS, facts, machine(1, 26.0))
    assert halves.config.rollout.max_num_seqs == 128 <= (halves.plan.cached or 0)
    assert "256 to sample in a step, in 2 waves" in halves.reasons["rollout.max_num_seqs"]
    said = choose(
        with_values(large, {"rollout.max_num_seqs": 256}),
        KNOBS - {"rollout.max_num_seqs"},
        facts,
        machine(1, 26.0),
    )
    assert said.plan.time and halves.plan.time
    assert said.plan.time.total > halves.plan.time.total


def test_engines_that_sample_ahead_do_not_sleep(shapes: dict[str, ModelFacts]) -> None:
    for gpus in COUNTS:
        choice = choose(recipe(max_lag=1), KNOBS, shapes["8b"], machine(gpus, 139.0))
        assert not choice.config.rollout.time_share


def test_nothing_is_chosen_on_a_cpu_and_where_nobody_knows_the_memory(
    shapes: dict[str, ModelFacts],
) -> None:
    for hardware in (Hardware(gpu=False), machine(4, 0.0)):
        choice = choose(recipe(), KNOBS, shapes["0.6b"], hardware)
        assert choice.config == recipe() and choice.lines() == []


def test_how_many_gpus_are_used_is_not_chosen_where_nobody_knows_how_many_there_are(
    shapes: dict[str, ModelFacts],
) -> None:
    choice = choose(recipe(), KNOBS, shapes["0.6b"], machine(8, 139.0, assumed=True))
    assert (choice.config.trainer.ranks, choice.config.rollout.engines) == (1, 1)
    assert "trainer.ranks" not in choice.values


@pytest.mark.usefixtures("quick_refusals")
def test_what_others_hold_of_a_gpu_is_left_to_them(shapes: dict[str, ModelFacts]) -> None:
    alone = choose(recipe(), KNOBS, shapes["1.7b"], machine(1, 139.0))
    hardware = machine(1, 139.0, taken_gib=90.0)
    choice = choose(recipe(), KNOBS, shapes["1.7b"], hardware)
    total = choice.plan.engine.total + choice.plan.trainer.total
    held = 90.0 if not choice.config.rollout.time_share else 0.0
    assert held + total / 2**30 <= 139.0 or choice.config.rollout.time_share
    assert choice.plan.peak / 2**30 <= 49.0 < alone.plan.peak / 2**30
    assert "90.0 GiB" in hardware.taken_warning
    with pytest.raises(ConfigError, match=r"137\.0 GiB"):
        choose(recipe(), KNOBS, shapes["1.7b"], machine(1, 139.0, taken_gib=137.0))


def test_a_run_that_goes_on_keeps_what_was_chosen(shapes: dict[str, ModelFacts]) -> None:
    first = choose(recipe(), KNOBS, shapes["1.7b"], machine(1, 139.0))
    kept = {**first.values, "trainer.micro_batch_tokens": 4608}  # lowered meanwhile
    again = choose(recipe(), KNOBS, shapes["1.7b"], machine(1, 139.0), kept)
    assert again.values == kept
    assert set(again.reasons.values()) == {CACHED}
    # The recipe's word comes before; and what fits no more is chosen anew.
    said = with_values(recipe(), {"trainer.micro_batch_tokens": 2304})
    left = KNOBS - {"trainer.micro_batch_tokens"}
    other = choose(said, left, shapes["1.7b"], machine(1, 139.0), kept)
    assert other.config.trainer.micro_batch_tokens == 2304
    smaller_configs = choose(recipe(), KNOBS, shapes["1.7b"], machine(1, 23.0), first.values)
    assert CACHED not in smaller_configs.reasons.values()


def test_a_supervised_run_chooses_how_it_trains_and_nothing_else(
    shapes: dict[str, ModelFacts],
) -> None:
    source = ConversationsConfig(name="a", source="jsonl", path="a")
    config = Config(
        model=ModelConfig(path="some/model", dtype="bfloat16"),
        sft=SftConfig(sources=(source,), conversations_per_step=64),
    ).supervised(200)
    choice = choose(config, KNOBS, shapes["1.7b"], machine(4, 79.0))
    assert choice.values["trainer.ranks"] == 4
    assert all(knob.startswith("trainer.") for knob in choice.values)
    assert choice.config.rollout == RolloutConfig()
    lone = choose(
        replace(config, trainer=TrainerConfig(ranks=2)),
        KNOBS - {"trainer.ranks"},
        shapes["1.7b"],
        machine(4, 79.0),
    )
    assert lone.config.trainer.ranks == 2


@pytest.mark.usefixtures("quick_refusals")
def test_what_waits_in_a_machines_memory_has_to_fit_there(shapes: dict[str, ModelFacts]) -> None:
    """147 GB of an 8B model's optimizer on one GPU of 79 GiB."""

    def on(memory_gib: float, gpus: int = 1) -> Hardware:
        (node,) = idle_nodes(1, gpus)
        nodes = (replace(node, memory_gib=memory_gib),)
        return Hardware(gpu=True, nodes=nodes, gpu_gib=79.0, note="x")

    for roomy in (0.0, 256.0):  # nobody knows; enough
        chosen = choose(recipe(), KNOBS, shapes["8b"], on(roomy)).values
        assert chosen["trainer.offload_optimizer"]
    with pytest.raises(ConfigError, match=r"keep at least \d+\.\d GiB in the memory of node 0"):
        choose(recipe(), KNOBS, shapes["8b"], on(64.0))
    said = with_values(
        recipe(),
        {
            "trainer.offload_optimizer": True,
            "trainer.zero_stage": 2,
            "trainer.activation_checkpointing": True,
            "trainer.micro_batch_tokens": 4096,
        },
    )
    wanted = r"1 trainer rank\(s\) keep at least 137\.\d GiB in .* \(trainer.off.* has 64\.0 GiB"
    with pytest.raises(ConfigError, match=wanted):
        choose(said, frozenset(), shapes["8b"], on(64.0, gpus=2))


def test_attention_is_kept_where_it_takes_long_and_fits(shapes: dict[str, ModelFacts]) -> None:
    """And activations are computed again: where they fit, nothing is."""

    def chosen(tokens: int, gib: float, model: Any = None, **left: Any) -> tuple[Any, str]:
        rollout = replace(recipe().rollout, sampling=SamplingConfig(max_tokens=tokens, top_k=512))
        config = replace(recipe(), rollout=rollout, model=model or recipe().model)
        choice = choose(
            with_values(config, left), KNOBS - set(left), shapes["1.7b"], machine(1, gib)
        )
        trainer = choice.config.trainer
        kept = (trainer.activation_checkpointing, trainer.keep_attention)
        return kept, choice.reasons["trainer.keep_attention"]

    assert chosen(30_000, 50.0)[0] == (True, True)
    assert "slower" in chosen(30_000, 50.0)[1]
    assert chosen(1_000, 139.0)[0] == (False, False)
    assert "no effect" in chosen(1_000, 139.0)[1]
    again = {"trainer.activation_checkpointing": True}
    assert chosen(1_000, 139.0, **again)[0] == (True, False)
    assert "contexts below 4,096" in chosen(1_000, 139.0, **again)[1]
    # Where the memory for it is lacking, nothing is refused that fits without.
    assert chosen(30_000, 26.0) == ((True, False), "with it: does not fit")
    engines = ModelConfig(path="a/model", batch_invariant=True)
    why = "not with model.batch_invariant"
    assert chosen(30_000, 50.0, model=engines, **again) == ((True, False), why)


def test_attention_is_not_kept_under_zero_3(shapes: dict[str, ModelFacts]) -> None:
    """Where it would save as much: weights are gathered inside what is computed again."""
    rollout = replace(recipe().rollout, sampling=SamplingConfig(max_tokens=30_000, top_k=512))
    config = replace(recipe(), rollout=rollout)
    for said, kept in (({"trainer.zero_stage": 3}, False), ({"trainer.zero_stage": 2}, True)):
        left = {"trainer.activation_checkpointing": True, **said}
        choice = choose(
            with_values(config, left), KNOBS - set(left), shapes["8b"], machine(8, 139.0)
        )
        assert choice.config.trainer.keep_attention == kept
        assert ("not with ZeRO 3" in choice.reasons["trainer.keep_attention"]) != kept
    trainer = replace(config.trainer, activation_checkpointing=True, keep_attention=True)
    assert [replace(trainer, zero_stage=n).keeps_attention for n in (1, 2, 3)] == [
        True,
        True,
        False,
    ]


def test_what_is_chosen_keeps_to_batch_invariant_kernels(shapes: dict[str, ModelFacts]) -> None:
    """No compiled layers and no ZeRO-3, where it would have taken them: on one GPU, and on eight
    small ones."""
    for shape, gpus, gib in (("1.7b", 1, 139.0), ("8b", 8, 79.0)):
        free = choose(recipe(), KNOBS, shapes[shape], machine(gpus, gib)).values
        model = replace(recipe().model, batch_invariant=True)
        config = replace(recipe(), model=model, run=replace(recipe().run, steps=2000))
        kept = choose(config, KNOBS, shapes[shape], machine(gpus, gib)).values
        assert not kept["trainer.compile"] and kept["trainer.zero_stage"] < 3
        assert set(free) == set(kept)


@pytest.mark.parametrize(
    ("dtype", "compiled"), [("bfloat16", True), ("float16", True), ("float32", False)]
)
def test_layers_of_half_precision_are_compiled(
    shapes: dict[str, ModelFacts], dtype: Any, compiled: bool
) -> None:
    model = replace(recipe().model, dtype=dtype)
    config = replace(recipe(), model=model, run=replace(recipe().run, steps=2000))
    values = choose(config, KNOBS, shapes["1.7b"], machine(1, 139.0)).values
    assert values["trainer.compile"] == compiled
