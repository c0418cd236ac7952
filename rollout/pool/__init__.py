"""Engine pool: dispatching, engine supervision and the Ray actors behind it."""
