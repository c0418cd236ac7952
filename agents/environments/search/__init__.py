"""An environment for searching a corpus. It has an index, and tools to search, open and find."""
