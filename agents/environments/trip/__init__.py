"""Planning a journey through synthetic cities: a general task as DeepSeek-V3.2 (2025) shows one."""
