"""An environment for searching a corpus. It consists of an index and of tools to search, open and
find."""
