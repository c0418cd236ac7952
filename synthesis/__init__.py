"""Pipelines that generate agent tasks. Models write the tasks, and checks called gates reject the
bad ones."""
