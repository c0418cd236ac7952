"""General tasks as in DeepSeek-V3.2 (2025), section 3.2.3: a database, tools and a verifier."""
