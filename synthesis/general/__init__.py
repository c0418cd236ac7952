"""Creates tasks for general agents. An author builds a database, tools for it, and increasingly
hard tasks (DeepSeek-V3.2, 2025, section 3.2.3)."""
