"""A search environment: a full-text index of a corpus, and tools to search, open and find."""
