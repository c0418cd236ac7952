"""The trainer's forward pass by the engine's own kernels (`model.batch_invariant`). Imports nothing
heavy."""

VARIABLE = "VLLM_BATCH_INVARIANT"
"""Environment variable that switches vLLM's kernels, those compiled in C++ too, before any runs."""
GRAPHS = "VLLM_USE_BREAKABLE_CUDAGRAPH"
"""vLLM would cut its CUDA graphs into pieces, so that GEMMs of compiled layers find their tiles.
With Keel batch-invariant layers are not compiled."""
BLOCK = 16
"""Tokens of a block of the KV cache, the engine's and that of the trainer's attention: with another
size, another kernel would run."""


def variables(wanted: bool) -> dict[str, str]:
    """Environment of a process that computes so."""
    return {VARIABLE: "1", GRAPHS: "0"} if wanted else {}
