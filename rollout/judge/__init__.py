"""The judge model that a run serves itself: a vLLM server that ends with the run."""
