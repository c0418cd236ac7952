"""Runs the trainer's forward pass with the engine's kernels (`model.batch_invariant`). This module
is cheap to import."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""The environment variable that makes vLLM use its batch-invariant kernels, including those in
C++."""
BLOCK = 16
"""Block size of the KV cache, both in the engine and in the trainer. Another size would select
another kernel."""


def variables(enabled: bool) -> dict[str, str]:
    """Return the environment variables that turn on vLLM's batch-invariant kernels, or {} if they
    are not enabled."""
    return {VARIABLE: "1"} if enabled else {}
