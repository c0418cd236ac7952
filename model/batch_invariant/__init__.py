"""Runs the trainer's forward pass with the engine's kernels (`model.batch_invariant`). This module
is cheap to import."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Makes vLLM use its batch-invariant kernels, including its C++ kernels."""
BLOCK = 16
"""Block size of the KV cache in engines and trainer. Another size would select another kernel."""


def variables(enabled: bool) -> dict[str, str]:
    """Return the environment variables that turn on these kernels if they are enabled."""
    return {VARIABLE: "1"} if enabled else {}
