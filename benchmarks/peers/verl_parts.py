"""Classes that replace two of verl's through its configuration.

For Qwen3, verl's own turn requires a tokenizer in which a line break is one token, to join the
turns of longer conversations. The tokenizer of `shape.build_tokenizer` has none and one turn needs
no joining, so `Turn` uses the generic prompt.

verl's trainer polls every two seconds for finished completions, a tenth of this benchmark's step.
`QuickReplayBuffer` polls twenty times per second.
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
