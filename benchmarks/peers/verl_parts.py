"""Two parts of verl's that its configuration lets a user put others in for.

For a Qwen3, verl's own turn demands that a line break is one token, as it joins the turns of longer
conversations with it. In the tokenizer of `shape.build_tokenizer` it is none, and one turn has
nothing to join: `Turn` has the prompt made as for models in general.

verl's trainer looks every two seconds whether all completions are there, and no knob says
otherwise: a tenth of this benchmark's step. `QuickReplayBuffer` looks twenty times a second.
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
    """`trainer.v1.sampler.custom_sampler`"""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": 0.05})
