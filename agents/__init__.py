"""Conversations over many turns: environments, tools, their host, and context management."""
