"""All engines of a run: who samples what, their lives, and Ray actors behind it."""
