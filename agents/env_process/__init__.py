"""Runs each episode's environment in a separate process."""
