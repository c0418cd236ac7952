"""Pipelines that generate tasks for agents: models write tasks and gates reject the bad ones."""
