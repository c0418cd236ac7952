"""Multi-turn episodes with tools and environments."""
