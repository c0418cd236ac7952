"""Runs multi-turn conversations with tools and environments, and manages their context."""
