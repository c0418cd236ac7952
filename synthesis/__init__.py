"""Pipelines that generate agent tasks. Models write the tasks, and gates reject the bad ones."""
