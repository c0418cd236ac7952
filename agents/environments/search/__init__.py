"""Search in a corpus: an index of its documents, and tools to search, open and find."""
