"""A single vLLM engine with its thread, its Ray actor, its requests and the patches that it
needs."""
