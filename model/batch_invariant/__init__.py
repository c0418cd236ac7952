"""Run the trainer's forward pass with the engine's kernels (`model.batch_invariant`). Importing
this module is cheap."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Environment variable that makes vLLM use its batch-invariant kernels, including its
C++ kernels."""
BLOCK = 16
"""Block size of the KV cache in engines and trainer. Another size would select another kernel."""


def variables(enabled: bool) -> dict[str, str]:
    """Return the environment variables that turn on batch-invariant kernels, or none if they're
    disabled."""
    return {VARIABLE: "1"} if enabled else {}
