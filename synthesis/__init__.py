"""Pipelines that make agents' tasks: models write them, and gates throw away what does not hold."""
