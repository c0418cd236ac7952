"""Trip planning in made-up cities: a general task like the example of DeepSeek-V3.2 (2025)."""
