"""Tasks for general agents: an author builds a database, tools for it, and increasingly hard tasks
(DeepSeek-V3.2, 2025, section 3.2.3)."""
