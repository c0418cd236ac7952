"""One vLLM engine: started, driven by a thread of its own, seen as a Ray actor."""
