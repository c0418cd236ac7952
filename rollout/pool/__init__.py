"""The engine pool, which sends requests to engines and restarts engines that fail."""
