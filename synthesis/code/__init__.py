"""Creates coding tasks from real code changes: an issue, the change that resolved it, and its
tests."""
