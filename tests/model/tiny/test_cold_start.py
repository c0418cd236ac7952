from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from keel.agents.environments.demonstrations import Demonstration, trip_demonstrations
from keel.configs.schema import (
    ColdStartConfig,
    ConfigError,
    EnvironmentConfig,
    SourceConfig,
    TinyModelConfig,
)
from keel.data.items import told as told_by
from keel.model.load import facts_of, load_model_config, load_tokenizer
from keel.model.tiny import cache, cold_start
from keel.model.tiny.build import build_model
from keel.model.tiny.cache import content_key, default_cache_dir, ensure_tiny_model, make_folder
from keel.model.tiny.cold_start import Curriculum, Example, Lesson, make_examples, train
from keel.model.tiny.on_gpu import plain, run_on_gpu
from keel.model.tiny.tokenizer import build_tokenizer
from tests.waiting import PATIENCE_S

TOKENIZER = build_tokenizer()
SPELLING = SourceConfig(name="spelling", source="reasoning_gym", task="spell_backward", size=8)
SPIRALS = SourceConfig(
    name="spirals", source="reasoning_gym", task="spiral_matrix", size=8, params={"max_n": 2}
)
TINY = TinyModelConfig(
    hidden_size=32,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=16,
    experts=2,
    experts_per_token=1,
    expert_size=32,
    cold_start=ColdStartConfig(steps=3, batch_size=4),
)


def curriculum(*sources: SourceConfig, seed: int = 0, **more: Any) -> Curriculum:
    return Curriculum(seed=seed, sources=sources, **more)


def ensure(folder: Path, config: TinyModelConfig = TINY, **options: object) -> Path:
    config = replace(config, cache_dir=str(folder))
    return ensure_tiny_model(config, curriculum(SPELLING), **options)


def test_one_that_a_disk_has_lost_part_of_is_made_again(tmp_path: Path) -> None:
    made = ensure(tmp_path)
    weights = made / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert ensure(tmp_path) == made and weights.read_bytes() == whole
    assert [path.name for path in tmp_path.iterdir()] == [made.name]
    mask = os.umask(0)
    os.umask(mask)
    assert made.stat().st_mode & 0o777 == 0o777 & ~mask, "others may read it as any folder"


def prompt_of(example: Example) -> tuple[int, ...]:
    lesson = example.worked
    return tuple(lesson.ids[: lesson.said.index(True)])


def answer_of(lesson: Lesson) -> list[int]:
    return list(lesson.ids[lesson.said.index(True) :])


def question_of(example: Example) -> str:
    text = TOKENIZER.decode(prompt_of(example))
    return text.removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(5)
    first = build_model(TINY, TOKENIZER, seed=1)
    untouched = torch.rand(1)
    second = build_model(TINY, TOKENIZER, seed=1)
    other = build_model(TINY, TOKENIZER, seed=2)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), untouched), "the caller's random state moved"
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_heldout_questions_are_never_taught() -> None:
    every = make_examples(curriculum(SPIRALS), TOKENIZER, count=200)
    questions = [question_of(example) for example in every]
    assert len(questions) == 200
    heldout = set(questions[::3])
    kept = make_examples(curriculum(SPIRALS, heldout_questions=heldout), TOKENIZER, count=200)
    left = [question_of(example) for example in kept]
    assert heldout.isdisjoint(left)
    assert left == [question for question in questions if question not in heldout]


def test_nothing_left_to_teach_is_an_error() -> None:
    every = make_examples(curriculum(SPELLING), TOKENIZER, count=20)
    heldout = [question_of(example) for example in every]
    with pytest.raises(ConfigError, match=r"data\.sources\[spelling\]: every question .* held out"):
        make_examples(curriculum(SPELLING, heldout_questions=heldout), TOKENIZER, count=20)
    lines = SourceConfig(name="lines", source="jsonl", path="some.jsonl")
    cubes = replace(SPELLING, name="cubes", task="rubiks_cube")
    for source in (lines, cubes):
        with pytest.raises(ConfigError, match=r"learns from reasoning_gym .* none is given"):
            make_examples(curriculum(source), TOKENIZER, count=20)
    with pytest.raises(ConfigError, match=r"\[trips\]\.env.*'d:trips': it made no conversation"):
        make_examples(curriculum(TRIPS, demonstrate=lambda *_: []), TOKENIZER, count=20)


def test_of_tasks_without_answers_none_is_made_up() -> None:
    sources = [SPELLING, replace(SPELLING, name="cubes", task="rubiks_cube")]
    examples = make_examples(curriculum(*sources), TOKENIZER, count=20)
    assert len(examples) == 10 and all("Spell" in question_of(one) for one in examples)


def test_a_task_that_takes_no_large_seed_is_taught() -> None:
    pools = replace(SPELLING, name="pools", task="pool_matrix")
    for seed in (0, 2**32 - 1):
        made = make_examples(curriculum(pools, seed=seed), TOKENIZER, count=4)
        assert len(set(map(question_of, made))) == 4


def test_questions_are_asked_as_in_rollouts() -> None:
    told = replace(SPELLING, system="Spell.", system_template="reasoning")
    (example,) = make_examples(curriculum(told), TOKENIZER, count=1)
    (system,) = told_by(told, ())
    assert system["content"].startswith("Reason before you answer.")
    prompt = TOKENIZER.decode(prompt_of(example))
    assert prompt.startswith(f"<|im_start|>system\n{system['content']}<|im_end|>\n")
    bare = replace(told, system_template="none")
    assert content_key(TINY, curriculum(told)) != content_key(TINY, curriculum(bare))


def test_sources_are_mixed_by_weight() -> None:
    unused = replace(SPIRALS, name="off", weight=0.0, holdout="all")
    sources = [SPELLING, replace(SPIRALS, weight=3.0), unused]
    examples = make_examples(curriculum(*sources), TOKENIZER, count=100)
    spelt = sum("Spell" in question_of(example) for example in examples)
    assert (spelt, len(examples)) == (25, 100)


def test_solutions_follow_the_chat_template() -> None:
    (thinking,) = make_examples(curriculum(SPELLING), TOKENIZER, count=1)
    assert TOKENIZER.decode(prompt_of(thinking)).endswith("<|im_start|>assistant\n")
    assert TOKENIZER.decode(answer_of(thinking.worked)).startswith("<think>\n1")
    assert TOKENIZER.decode(answer_of(thinking.hasty)).startswith("<think>\n\n</think>\n\n")
    assert thinking.worked.ids[-1] == thinking.hasty.ids[-1] == TOKENIZER.eos_token_id

    direct = replace(SPELLING, thinking=False, system="Spell.")
    (plain,) = make_examples(curriculum(direct), TOKENIZER, count=1)
    prompt = TOKENIZER.decode(prompt_of(plain))
    assert prompt.startswith("<|im_start|>system\nSpell.<|im_end|>\n")
    assert prompt.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    answer = TOKENIZER.decode(answer_of(plain.worked)).removesuffix("<|im_end|>")
    assert plain.worked == plain.hasty
    assert answer == TOKENIZER.decode(answer_of(thinking.worked)).split("\n\n")[1].removesuffix(
        "<|im_end|>"
    )


TRIPS = SourceConfig(
    name="trips",
    source="environment",
    environment=EnvironmentConfig(target="t:Trip", demonstrations="d:trips"),
    size=8,
    weight=3.0,
)


@pytest.mark.parametrize("inside", [False, True])
def test_of_a_conversation_only_the_policys_words_are_learned(inside: bool) -> None:
    """inside: with calls in the thinking, which the first of them opens."""

    def demonstrate(source: str, count: int) -> list[Demonstration]:
        assert source == "trips"
        return trip_demonstrations(count, seed=1, arguments={"level": 0})

    examples = make_examples(
        curriculum(SPELLING, TRIPS, demonstrate=demonstrate, tools_in_thinking=inside),
        TOKENIZER,
        count=20,
    )
    assert len(examples) == 20
    config = ColdStartConfig(steps=1, batch_size=20, worked_fraction=1.0)
    ((inputs, targets),) = cold_start._batches(examples, TOKENIZER, config, random.Random(0))
    (row, *_) = [i for i, ids in enumerate(inputs) if "Find a hotel" in TOKENIZER.decode(ids)]
    learned = inputs[row, 1:][targets[row, :-1] != cold_start.IGNORED]
    said = TOKENIZER.decode(learned)
    opened = "<think>\n" if inside else ""
    assert said.startswith(f"{opened}@get_all_hotels_by_city ") and said.count("<|im_end|>") == 2
    assert said.count("<think>") == inside and "</think>" not in said
    assert "@submit_result " in said and "Find a hotel" not in said
    assert (targets[row, :-1][targets[row, :-1] >= 0] == learned).all()
    with pytest.raises(ConfigError, match="demonstrations"):
        make_examples(curriculum(TRIPS), TOKENIZER, count=20)


def test_no_two_seeds_share_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "SEED_STRIDE", 100)
    large = replace(SPIRALS, params={"min_n": 4, "max_n": 4})

    def asked(seed: int, count: int) -> set[tuple[int, ...]]:
        examples = make_examples(curriculum(large, seed=seed), TOKENIZER, count=count)
        return {prompt_of(example) for example in examples}

    for count in (50, 150):
        assert len(asked(0, count)) == count
        assert asked(0, count).isdisjoint(asked(1, count))


def test_the_initializer_range_is_the_recipes() -> None:
    spreads = [
        float(build_model(replace(TINY, **knob), TOKENIZER, seed=0).lm_head.weight.detach().std())
        for knob in ({}, {"initializer_range": 0.02})
    ]
    assert spreads == pytest.approx([0.05, 0.02], rel=0.05)


def test_training_lowers_the_loss_and_reports_each_step() -> None:
    model = build_model(TINY, TOKENIZER, seed=0)
    examples = make_examples(curriculum(SPELLING), TOKENIZER, count=64)
    config = ColdStartConfig(steps=30, batch_size=8, lr=1e-2)
    threads = torch.get_num_threads()
    seen: list[tuple[int, float]] = []
    final = train(
        model,
        TOKENIZER,
        examples,
        config,
        seed=0,
        progress=lambda n, loss, _: seen.append((n, loss)),
    )
    assert [step for step, _ in seen] == list(range(1, 31))
    assert final == seen[-1][1] < 0.6 * seen[0][1]
    assert torch.get_num_threads() == threads
    assert not model.training


def test_a_cold_start_over_its_time_fails(tmp_path: Path) -> None:
    slow = replace(TINY, cold_start=ColdStartConfig(steps=3, batch_size=4, max_seconds=1e-6))
    with pytest.raises(
        TimeoutError, match=r"^model\.tiny\.cold_start\.max_seconds = 1e-06: 1 of 3 steps took"
    ):
        ensure(tmp_path, slow)
    assert list(tmp_path.iterdir()) == []


def test_the_same_settings_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = ensure(tmp_path / "a"), ensure(tmp_path / "b")
    assert first.name == second.name
    files = sorted(path.name for path in first.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_kept_model_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure(tmp_path)
    monkeypatch.setattr(cache, "train", lambda *_, **__: pytest.fail("trained again"))
    assert ensure(tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name], "nothing unfinished stays"


def test_processes_at_once_agree_on_one_folder(tmp_path: Path) -> None:
    folders: list[Path] = []
    untaught = replace(TINY, cold_start=ColdStartConfig(steps=0))
    threads = [
        threading.Thread(target=lambda: folders.append(ensure(tmp_path, untaught)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert len(folders) == 3
    assert len(set(folders)) == 1
    assert list(tmp_path.iterdir()) == [folders[0]]


def test_the_key_covers_what_the_weights_depend_on() -> None:
    def key(config: TinyModelConfig = TINY, seed: int = 0, heldout: tuple[str, ...] = ()) -> str:
        return content_key(config, curriculum(SPELLING, seed=seed, heldout_questions=heldout))

    harder = replace(SPELLING, params={"min_word_len": 5})
    keys = {
        key(),
        key(seed=1),
        key(heldout=("a",)),
        key(replace(TINY, layers=2)),
        key(replace(TINY, cold_start=replace(TINY.cold_start, worked_fraction=0.9))),
        content_key(TINY, curriculum(harder)),
    }
    assert len(keys) == 6
    inside, after = (
        content_key(TINY, curriculum(TRIPS, tools_in_thinking=t)) for t in (True, False)
    )
    assert inside != after
    assert key(replace(TINY, cache_dir="elsewhere")) == key()
    assert key(heldout=("a", "b")) == key(heldout=("b", "a", "b"))


def test_the_folder_loads_like_any_model(tmp_path: Path) -> None:
    folder = str(ensure(tmp_path))
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    tokenizer = load_tokenizer(folder)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.model_max_length == TINY.max_context
    assert facts_of(load_model_config(folder)) == facts_of(model.config)
    assert facts_of(load_model_config(folder)).moe_layer_ids == (0,)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert default_cache_dir() == Path("/somewhere/keel")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == Path.home() / ".cache" / "keel"


@pytest.mark.e2e
def test_a_process_of_its_own_teaches_like_this_one(tmp_path: Path) -> None:
    """As on a GPU, with the CPU in its place."""
    given = curriculum(SPELLING, heldout_questions={"a"})
    make = partial(make_folder, tmp_path / "apart", TINY, given)
    seen: list[int] = []
    run_on_gpu(make, "cpu", timeout_s=PATIENCE_S, progress=lambda step, *_: seen.append(step))
    assert seen == [1, 2, 3]
    here = ensure_tiny_model(replace(TINY, cache_dir=str(tmp_path / "here")), given)
    apart = AutoModelForCausalLM.from_pretrained(tmp_path / "apart").state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(here).state_dict().items():
        torch.testing.assert_close(apart[name], tensor, rtol=0.0, atol=1e-3)


def die(**_: Any) -> None:
    os._exit(7)


def hang(**_: Any) -> None:
    time.sleep(1000)


@pytest.mark.e2e
def test_what_goes_wrong_in_that_process_is_raised_here(tmp_path: Path) -> None:
    slow = replace(TINY, cold_start=ColdStartConfig(steps=3, batch_size=4, max_seconds=1e-6))
    make = partial(make_folder, tmp_path / "slow", slow, curriculum(SPELLING))
    with pytest.raises(TimeoutError, match="1 of 3 steps took"):
        run_on_gpu(make, "cpu", timeout_s=PATIENCE_S)
    with pytest.raises(RuntimeError, match=r"died \(exit code 7\)"):
        run_on_gpu(die, "cpu", timeout_s=PATIENCE_S)
    assert list(tmp_path.iterdir()) == []


def test_errors_that_a_pipe_may_not_carry_come_in_words() -> None:
    config = ConfigError("data.sources: none is given")
    assert plain(config) is config
    other = plain(AssertionError("a kernel is missing"))
    assert type(other) is RuntimeError
    assert str(other).endswith("on a GPU: AssertionError: a kernel is missing")


def test_that_process_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keel.model.tiny.on_gpu.START_S", 0.0)
    with pytest.raises(TimeoutError, match="no end on cpu after 0 s"):
        run_on_gpu(hang, "cpu", timeout_s=0.1)


def test_a_gpus_model_is_kept_apart_from_a_cpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def instead(make: Any, device: str, **_: Any) -> None:
        calls.append(device)
        make(device="cpu")

    monkeypatch.setattr(cache, "run_on_gpu", instead)
    here, there = ensure(tmp_path), ensure(tmp_path, device="cuda")
    assert ensure(tmp_path, device="cuda") == there != here
    untaught = replace(TINY, cold_start=ColdStartConfig(steps=0))
    assert ensure(tmp_path, untaught) == ensure(tmp_path, untaught, device="cuda")
    assert calls == ["cuda"], "weights that are only drawn need no GPU"
