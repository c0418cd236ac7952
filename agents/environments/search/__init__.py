"""A corpus to search in: an index of its documents, and the tools that search, open and find."""
