"""An environment for planning trips in made-up cities, like the example in DeepSeek-V3.2 (2025)."""
