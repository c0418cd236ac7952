"""Programs of their own, with nothing but Python's own modules: around some of Ray's, or in the
place of those that load half of Ray for little."""
