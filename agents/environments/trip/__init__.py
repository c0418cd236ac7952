"""Trip planning in fictional cities, as in DeepSeek-V3.2 (2025)."""
