"""verl's single turn with the benchmark's tokenizer.

For a Qwen3, verl's own demands that a line break is one token, as it joins the turns of longer
conversations with it. In the tokenizer of `shape.build_tokenizer` it is none, and one turn has
nothing to join: so the builder for models in general makes the prompt.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import (  # pyright: ignore[reportMissingImports]
    SingleTurnAgentLoop,
)

NAME = "benchmark_turn"


class Turn(SingleTurnAgentLoop):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "hf_model_type": None})
