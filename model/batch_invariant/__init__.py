"""The trainer's forward pass with the engine's kernels (`model.batch_invariant`).

This module imports nothing heavy.
"""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Environment variable that selects vLLM's batch-invariant kernels, including C++ ones."""
BLOCK = 16
"""Block size of the KV cache in engine and trainer; another size selects another kernel."""


def variables(enabled: bool) -> dict[str, str]:
    """Return the environment variables for a process."""
    return {VARIABLE: "1"} if enabled else {}
