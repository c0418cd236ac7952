"""An environment for searching a corpus, with an index and tools to search, open and find."""
