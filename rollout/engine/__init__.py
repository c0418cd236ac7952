"""A single vLLM engine, with its thread, Ray actor, requests and vLLM patches."""
