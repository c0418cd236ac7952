"""What a run will take: memory, time, placement, and what to change if it does not fit."""
