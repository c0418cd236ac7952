"""The engine pool, which dispatches requests to engines and restarts engines that fail."""
