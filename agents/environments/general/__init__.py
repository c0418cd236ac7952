"""General tasks, each with a database, tools and a verifier (DeepSeek-V3.2, 2025, section
3.2.3)."""
