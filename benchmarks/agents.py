"""Throughput of agent episodes compared with plain prompts on one engine.

    python -m benchmarks.agents --out OUT                  # 1.2 B parameters, bound by the host
    python -m benchmarks.agents --out OUT --model 8b       # width and depth of a common 8 B model
    python -m benchmarks.agents --out OUT --model small    # smoke test on a CPU

The engine is a Ray actor and 256 concurrent episodes run in this process, as in a training run. An
episode has 8 turns of 200 sampled tokens; after each turn but the last, a tool returns 20 tokens
after 50 ms. *whole* prompts have the episode's opening and sample as many tokens in one completion.
*by_turn* prompts hold the context of one turn and sample 200 tokens: the same requests without
tools, waits or cached prefixes. All record routes and sampling masks. Weights are random, so each
parsed turn is replaced by a tool call. The three workloads alternate; ratios are medians over
rounds.
"""

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import ray
import torch

from benchmarks.common import arguments, run_facts
from keel.agents.episode import Budget, EpisodeSettings
from keel.agents.runner import EpisodeRunner
from keel.agents.types import Opening, ToolResult
from keel.configs.schema import RolloutConfig, SamplingConfig, TinyModelConfig
from keel.model.tiny.build import build_model
from keel.model.tiny.tokenizer import build_tokenizer
from keel.rl.turns import Message, Parsed, ToolCall, ToolSpec
from keel.rl.types import Group, Prompt, Verdict
from keel.rollout.chat.chat import TemplateChat
from keel.rollout.engine.worker import RayEngine
from keel.rollout.pool import RolloutPool
from keel.rollout.spec import EngineSpec

EPISODES, TURNS, TURN_TOKENS = 256, 8, 200
RESULT_TOKENS = 30
"""Tokens of a tool result including its markers."""
CONTEXT = 2560
ROUND_S = 300.0
TOOL_S = 0.05
RESULT = "twenty tokens at all"
"""20 tokens with the tiny tokenizer, which has one per letter."""
TOOL = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})


def _mixture(
    hidden: int, layers: int, heads: int, kv_heads: int, head: int, *experts: int
) -> TinyModelConfig:
    number, per_token, size = experts
    return TinyModelConfig(
        hidden_size=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head,
        experts=number,
        experts_per_token=per_token,
        expert_size=size,
        initializer_range=0.02,
        max_context=CONTEXT,
    )


MODELS = {
    "8b": _mixture(4096, 32, 32, 8, 128, 16, 4, 1024),
    "1b": _mixture(1024, 16, 16, 4, 64, 32, 4, 768),
    "small": TinyModelConfig(max_context=CONTEXT),
}


class Looking:
    """Environment in this process with a tool that takes `TOOL_S` seconds."""

    async def open(self, task: Prompt, *, seed: int) -> Opening:
        return Opening(messages=task.messages, tools=(TOOL,))

    async def call(self, call: ToolCall, *, timeout_s: float) -> ToolResult:
        await asyncio.sleep(TOOL_S)
        return ToolResult(text=RESULT)

    async def reply(self, turn: Message) -> Message | None:
        return None

    async def verdict(self, messages: Sequence[Message], finish_reason: str) -> Verdict:
        return Verdict(parts={"correct": 0.0})

    async def close(self) -> None:
        pass


class CallingChat(TemplateChat):
    """Chat format that parses each turn and then returns a tool call instead."""

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return ()

    def parse(
        self, sampled: Sequence[int], tools: Sequence[ToolSpec], *, turn: int, **how: Any
    ) -> Parsed:
        super().parse(sampled, tools, turn=turn, **how)
        call = ToolCall(call_id=f"call_{turn}_0", name=TOOL.name, arguments={})
        last = turn + 1 == TURNS
        return Parsed(content="", reasoning="", closed=True, calls=() if last else (call,))


def write_model(folder: Path, config: TinyModelConfig) -> int:
    """Write random weights with a peaked head that never end a turn; return the parameter count."""
    tokenizer = build_tokenizer()
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = build_model(config, tokenizer, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(8.0)
        # Logits of 0 are never in the top k.
        model.lm_head.weight[list(TemplateChat(tokenizer).ends.values())] = 0.0
    model.to(torch.bfloat16 if torch.cuda.is_available() else torch.float32).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
    tokenizer.save_pretrained(folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    del model
    torch.cuda.empty_cache()  # for the engine, which is another process
    return parameters


def prompts(count: int, salt: str) -> list[Prompt]:
    text = "What is there to be seen, and where, and since when? "
    return [
        Prompt(
            prompt_id=f"{salt}{i}",
            domain="made",
            messages=({"role": "user", "content": f"{salt}{i}: {text * 2}"},),
            tools=(TOOL.as_json(),),
            thinking=False,
            environment="look",
        )
        for i in range(count)
    ]


def turn_prompts(count: int, turns: int, salt: str) -> list[Prompt]:
    """Make a prompt per turn of `count` episodes: unshared text as long as the turn's context."""
    draw = random.Random(salt)
    made: list[Prompt] = []
    for turn in range(turns):
        for prompt in prompts(count, f"{salt}turn{turn} "):
            # A letter is a token.
            more = "".join(draw.choices(ascii_lowercase, k=turn * (TURN_TOKENS + RESULT_TOKENS)))
            message = {"role": "user", "content": more + str(prompt.messages[0]["content"])}
            made.append(replace(prompt, messages=(message,), environment=""))
    return made


def timed(
    pool: RolloutPool, submit: Callable[[], Sequence[Future[Group]]]
) -> tuple[list[Group], dict[str, float]]:
    """Sample groups; return them with their speed and the engine's time per step."""
    steps, busy_s = stats(pool)
    began = time.monotonic()
    groups = [future.result(timeout=ROUND_S) for future in submit()]
    seconds, (steps_now, busy_now) = time.monotonic() - began, stats(pool)
    tokens = sum(t.sampled_tokens for group in groups for t in group.trajectories)
    ms_per_step = 1e3 * (busy_now - busy_s) / (steps_now - steps)
    return groups, {"tokens_per_second": tokens / seconds, "ms_per_step": ms_per_step}


def stats(pool: RolloutPool) -> tuple[int, float]:
    """Return the engine's steps and the seconds it took for them."""
    (slot,) = pool.slots
    call = slot.engine.actor.__ray_call__
    read = lambda worker: (worker._engine._steps, worker._engine._busy_s)  # noqa: E731
    return ray.get(call.remote(read), timeout=ROUND_S)


def measure(
    pool: RolloutPool, runner: EpisodeRunner, sampling: SamplingConfig, count: int, salt: str
) -> dict[str, Any]:
    """Run one round: episodes, then both kinds of plain prompts."""

    def plainly(requests: Sequence[Prompt], sampling: SamplingConfig) -> dict[str, float]:
        return timed(
            pool, lambda: [pool.submit(p, group_size=1, sampling=sampling) for p in requests]
        )[1]

    episodes = prompts(count, salt)
    groups, agents = timed(
        pool, lambda: [runner.submit(p, group_size=1, purpose="train") for p in episodes]
    )
    usages = [t.usage for group in groups for t in group.trajectories if t.usage is not None]
    plain = [replace(p, environment="") for p in prompts(count, f"{salt}plain")]
    whole = plainly(plain, sampling)
    turns = max(usage.turns for usage in usages)
    each = replace(sampling, max_tokens=TURN_TOKENS)
    by_turn = plainly(turn_prompts(count, turns, salt), each)
    return {
        "ratio": agents["tokens_per_second"] / whole["tokens_per_second"],
        "ratio_by_turn": agents["tokens_per_second"] / by_turn["tokens_per_second"],
        "agents": agents,
        "whole": whole,
        "by_turn": by_turn,
        "dropped": sorted({reason for group in groups for reason in group.dropped}),
        "prefix_hit_fraction": sum(u.cached_tokens for u in usages)
        / sum(u.repeated_tokens for u in usages),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", choices=list(MODELS), default="1b")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    gpu = torch.cuda.is_available()
    sampling = SamplingConfig(top_p=0.95, top_k=64, max_tokens=TURNS * TURN_TOKENS)
    with tempfile.TemporaryDirectory() as scratch:
        parameters = write_model(Path(scratch), MODELS[options.model])
        tokenizer = build_tokenizer()
        spec = EngineSpec(
            model_path=scratch,
            tokenizer=scratch,
            config=RolloutConfig(
                sampling=sampling, max_num_seqs=EPISODES, kv_cache_gib=2.0, threads=2
            ),
            dtype="bfloat16" if gpu else "float32",
            max_model_len=CONTEXT,
            seed=0,
            keep_routing=True,
            keep_sampling_mask=True,
            conversations=EPISODES,
        )
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        build = partial(RayEngine, spec, gpu=gpu)
        pool = RolloutPool(spec.config, build, startup_timeout_s=ROUND_S)
        kind = EpisodeSettings(
            environment=lambda _: Looking(),
            chat=CallingChat(tokenizer),
            budget=Budget(
                turns=TURNS,
                turn_tokens=TURN_TOKENS,
                tokens=TURNS * TURN_TOKENS,
                window=CONTEXT,
            ),
        )
        runner = EpisodeRunner(
            {"look": kind},
            submit_turn=lambda request, purpose: pool.turn(
                request, sampling=sampling, purpose=purpose
            ),
            seed=0,
            most_open=lambda: EPISODES,
        )
        report = {**run_facts(), "parameters": parameters}
        rounds: list[dict[str, Any]] = []
        try:
            pool.start()
            measure(pool, runner, sampling, 16, "warm")
            for index in range(options.rounds):
                rounds.append(measure(pool, runner, sampling, EPISODES, f"{index} "))
                medians = {
                    kind: statistics.median(row[kind] for row in rounds)
                    for kind in ("ratio", "ratio_by_turn")
                }
                text = json.dumps(report | medians | {"rounds": rounds}, indent=1)
                (options.out / "agents.json").write_text(text)
                print(json.dumps(rounds[-1], indent=1), flush=True)
        finally:
            runner.close()
            pool.shutdown()
            ray.shutdown()


if __name__ == "__main__":
    main()
