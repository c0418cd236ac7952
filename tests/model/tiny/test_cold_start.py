"""The cold start: tokenizer, solutions, scripted conversations, training, and cached models."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from keel.agents.environments.demonstrations import Demonstration, trip_demonstrations
from keel.configs.schema import (
    ColdStartConfig,
    ConfigError,
    EnvironmentConfig,
    SourceConfig,
    TinyModelConfig,
)
from keel.model.load import facts_of, load_model_config, load_tokenizer
from keel.model.tiny import build, cold_start
from keel.model.tiny.build import _content_key, build_model, ensure_tiny_model
from keel.model.tiny.cold_start import (
    TAUGHT,
    Curriculum,
    _conversation_ids,
    _ExamplePair,
    _format_solution,
    _MaskedIds,
    make_examples,
    train,
)
from keel.model.tiny.tokenizer import TURN_END, build_tokenizer
from keel.rollout.chat.chat import TemplateChat

TOKENIZER = build_tokenizer()
SPELLING = SourceConfig(name="spelling", source="reasoning_gym", task="spell_backward", size=8)
SPIRALS = SourceConfig(
    name="spirals", source="reasoning_gym", task="spiral_matrix", size=8, params={"max_n": 2}
)
TRIPS = SourceConfig(
    name="trips",
    source="environment",
    environment=EnvironmentConfig(target="t:Trip", demonstrations="d:trips"),
    size=8,
    weight=3.0,
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


def examples_of(*sources: SourceConfig, count: int = 20, **more: Any) -> list[_ExamplePair]:
    return make_examples(curriculum(*sources, **more), TOKENIZER, count=count)


def make_prompt(example: _ExamplePair) -> str:
    worked = example.worked
    return TOKENIZER.decode(worked.ids[: worked.learned.index(True)])


def answer_of(masked: _MaskedIds) -> str:
    return TOKENIZER.decode(masked.ids[masked.learned.index(True) :])


def question_digest(example: _ExamplePair) -> str:
    return make_prompt(example).removeprefix("<|im_start|>user\n").split("<|im_end|>")[0]


def test_heldout_questions_are_excluded() -> None:
    questions = [question_digest(example) for example in examples_of(SPIRALS, count=200)]
    assert len(questions) == 200
    heldout = set(questions[::3])
    remaining = examples_of(SPIRALS, count=200, heldout_questions=heldout)
    expected = [question for question in questions if question not in heldout]
    assert [question_digest(example) for example in remaining] == expected
    with pytest.raises(ConfigError, match="spirals"):
        examples_of(SPIRALS, heldout_questions={question_digest(e) for e in examples_of(SPIRALS)})


def test_solutions_follow_the_chat_template() -> None:
    (thinking,) = examples_of(SPELLING, count=1)
    assert make_prompt(thinking).endswith("<|im_start|>assistant\n")
    assert answer_of(thinking.worked).startswith("<think>\n1")
    assert answer_of(thinking.hasty).startswith("<think>\n\n</think>\n\n")
    assert thinking.worked.ids[-1] == thinking.hasty.ids[-1] == TOKENIZER.eos_token_id

    (direct,) = examples_of(replace(SPELLING, thinking=False, system="Spell."), count=1)
    assert make_prompt(direct).startswith("<|im_start|>system\nSpell.<|im_end|>\n")
    assert make_prompt(direct).endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert direct.worked == direct.hasty
    assert answer_of(direct.worked) == answer_of(thinking.worked).split("\n\n")[1]


@pytest.mark.parametrize("inside", [False, True])
def test_only_the_policys_turns_are_learned(inside: bool) -> None:
    def demonstrate(source: str, count: int) -> list[Demonstration]:
        assert source == "trips"
        return trip_demonstrations(count, seed=1, arguments={"level": 0})

    names = ["trips"] if inside else []
    examples = examples_of(SPELLING, TRIPS, demonstrate=demonstrate, tools_in_thinking=names)
    assert len(examples) == 20
    config = ColdStartConfig(steps=1, batch_size=20, worked_fraction=1.0)
    ((inputs, targets),) = cold_start._batches(examples, TOKENIZER, config, random.Random(0))
    (row, *_) = [i for i, ids in enumerate(inputs) if "Find a hotel" in TOKENIZER.decode(ids)]
    learned = inputs[row, 1:][targets[row, :-1] != cold_start._IGNORED]
    text = TOKENIZER.decode(learned)
    opening = "<think>\n" if inside else ""
    assert text.startswith(f"{opening}@get_all_hotels_by_city ") and text.count("<|im_end|>") == 2
    assert text.count("<think>") == inside and "</think>" not in text
    assert "@submit_result " in text and "Find a hotel" not in text
    assert (targets[row, :-1][targets[row, :-1] >= 0] == learned).all()


def test_training_lowers_the_loss_and_reports_steps() -> None:
    model = build_model(TINY, TOKENIZER, seed=0)
    config = ColdStartConfig(steps=30, batch_size=8, lr=1e-2)
    threads = torch.get_num_threads()
    seen: list[tuple[int, float]] = []
    final = train(
        model,
        TOKENIZER,
        examples_of(SPELLING, count=64),
        config,
        seed=0,
        progress=lambda n, loss, _: seen.append((n, loss)),
    )
    assert [step for step, _ in seen] == list(range(1, 31))
    assert final == seen[-1][1] < 0.6 * seen[0][1]
    assert torch.get_num_threads() == threads and not model.training


def test_cache_is_deterministic_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ensure(tmp_path / "a"), ensure(tmp_path / "b")
    assert first.name == second.name
    files = sorted(path.name for path in first.iterdir())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    for name in files:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    monkeypatch.setattr(build, "train", lambda *_, **__: pytest.fail("trained again"))
    assert ensure(tmp_path / "a") == first
    assert [path.name for path in first.parent.iterdir()] == [first.name]

    model, tokenizer = AutoModelForCausalLM.from_pretrained(first), load_tokenizer(str(first))
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.model_max_length == TINY.max_context
    assert facts_of(load_model_config(str(first))) == facts_of(model.config)


def test_content_key_covers_what_weights_depend_on() -> None:
    def key(config: TinyModelConfig = TINY, seed: int = 0, heldout: tuple[str, ...] = ()) -> str:
        named = curriculum(SPELLING, seed=seed, heldout_questions=frozenset(heldout))
        return _content_key(config, named)

    keys = {
        key(),
        key(seed=1),
        key(heldout=("a",)),
        key(replace(TINY, layers=2)),
        key(replace(TINY, cold_start=replace(TINY.cold_start, worked_fraction=0.9))),
        key(replace(TINY, family="deepseek_v32")),
        _content_key(TINY, curriculum(replace(SPELLING, params={"min_word_len": 5}))),
        *(_content_key(TINY, curriculum(TRIPS, tools_in_thinking=t)) for t in (["trips"], [])),
    }
    assert len(keys) == 9
    assert key(replace(TINY, cache_dir="elsewhere", index_top_k=5)) == key()
    assert key(heldout=("a", "b")) == key(heldout=("b", "a", "b"))
    untrained = replace(TINY, cold_start=replace(TINY.cold_start, steps=0))
    assert key(untrained, heldout=("a",)) == _content_key(untrained, Curriculum(seed=0))


def test_ids_with_calls_in_thinking_equal_those_of_a_rollout() -> None:
    chat = TemplateChat(TOKENIZER, tools_in_thinking=True)
    pairs = [
        pair
        for level in (0, 1)
        for pair in trip_demonstrations(5, seed=2, arguments={"level": level})
    ]
    for pair in pairs:
        ids, learned = _conversation_ids(
            TOKENIZER, pair.worked, pair.tools, thinking=True, tools_in_thinking=True
        )
        context = chat.opening(pair.worked[:1], pair.tools, thinking=True)
        results = [message for message in pair.worked if message["role"] == "tool"]
        turns = [message for message in pair.worked if message["role"] == "assistant"]
        end = 0
        for turn, message in enumerate(turns):
            start = len(context)
            assert ids[:start] == context and not learned[start - 1] and learned[start]
            end = start + learned[start:].index(False) if False in learned[start:] else len(ids)
            sampled = ids[start:end]
            assert TOKENIZER.decode(sampled[-1]) == TURN_END
            parsed = chat.parse(sampled, pair.tools, thinking=True, turn=turn, in_thinking=turn > 0)
            assert parsed.in_thinking
            function = message["tool_calls"][0]["function"]
            (call,) = parsed.calls
            assert call.name == function["name"]  # pyright: ignore
            assert call.arguments == function["arguments"]  # pyright: ignore
            if turn < len(results):
                context = chat.extend([*context, *sampled], [results[turn]], thinking=True)
        assert end == len(ids)


@given(st.text(st.characters(exclude_categories=["Cs"])))  # the default takes 2 s to set up
def test_any_text_round_trips(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


PARAMS = {
    "basic_arithmetic": {"operators": ["+", "-"], "allow_parentheses": False},
    "chain_sum": {"allow_negation": True},
    "gcd": {"max_numbers": 4},
    "spell_backward": {},
    "spiral_matrix": {"max_n": 6},
}


@pytest.mark.parametrize("task", TAUGHT)
def test_worked_solutions_are_right_hasty_ones_wrong(task: str) -> None:
    dataset = reasoning_gym.create_dataset(task, seed=7, size=100, **PARAMS[task])
    right = {True: 0, False: 0}
    for entry in dataset:
        for worked in right:
            turn = _format_solution(task, entry, worked=worked)
            assert bool(turn.removeprefix("<think>\n").split("\n</think>", 1)[0]) == worked
            right[worked] += dataset.score_answer(turn.split("</think>\n\n", 1)[1], entry) == 1.0
    assert right[True] == 100 and right[False] < 25
