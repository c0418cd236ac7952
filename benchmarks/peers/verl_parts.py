"""Replacements for two of verl's classes, selected through its configuration.

`Turn` uses the generic prompt: verl's turn for Qwen3 needs a tokenizer with a line break token to
join the turns of longer conversations, which `shape.build_tokenizer` lacks and one turn does not
need.

`QuickReplayBuffer` polls for finished completions every 0.05 s instead of every 2 s, a tenth of
this benchmark's step.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import (  # pyright: ignore[reportMissingImports]
    SingleTurnAgentLoop,
)
from verl.trainer.ppo.v1.replay_buffer import (  # pyright: ignore[reportMissingImports]
    ReplayBuffer,
)


class Turn(SingleTurnAgentLoop):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "hf_model_type": None})


class QuickReplayBuffer(ReplayBuffer):
    """Replay buffer for `trainer.v1.sampler.custom_sampler`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": 0.05})
