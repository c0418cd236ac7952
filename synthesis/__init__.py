"""Pipelines that generate tasks for agents: models write them and gates reject the bad ones."""
