"""The judge that a run serves itself: a vLLM server that ends with its owner."""
