"""General tasks as DeepSeek-V3.2 (2025), section 3.2.3, has them made: a database, tools over it,
and a verifier."""
