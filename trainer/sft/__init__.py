"""`keel sft`: its loop, and what it is wired from."""
