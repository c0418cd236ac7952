"""One vLLM engine: its thread and Ray actor, its requests, and the patches that it needs."""
