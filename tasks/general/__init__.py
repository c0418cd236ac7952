"""General agents' tasks: an author fills a database, writes tools over it, and tasks that grow harder.

DeepSeek-V3.2 (2025), section 3.2.3."""
