"""Runs the trainer's forward pass with the engine's kernels (`model.batch_invariant`). Importing
this module is cheap."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""The environment variable that makes vLLM use its batch-invariant kernels, including those in
C++."""
BLOCK = 16
"""The block size of the KV cache, both in the engine and in the trainer. A different size would
select a different kernel."""


def variables(enabled: bool) -> dict[str, str]:
    """Return the environment variables to set for a process."""
    return {VARIABLE: "1"} if enabled else {}
