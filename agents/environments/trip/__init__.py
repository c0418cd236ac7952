"""Planning a journey through made-up cities: a general task as DeepSeek-V3.2 (2025) shows one."""
