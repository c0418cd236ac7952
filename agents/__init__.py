"""Multi-turn conversations: environments, tools, their processes, and context management."""
