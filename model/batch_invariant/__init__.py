"""The trainer's forward pass by the engine's own kernels (`model.batch_invariant`). Imports nothing
heavy."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Environment variable that switches vLLM's kernels, those compiled in C++ too, before any runs."""
BLOCK = 16
"""Tokens of a block of the KV cache, the engine's and that of the trainer's attention: with another
size, another kernel would run."""


def variables(wanted: bool) -> dict[str, str]:
    """Environment of a process that computes so."""
    return {VARIABLE: "1"} if wanted else {}
