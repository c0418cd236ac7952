"""General agents' tasks: an author fills a database, writes tools, and tasks that grow harder.

DeepSeek-V3.2 (2025), section 3.2.3."""
