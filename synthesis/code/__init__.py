"""Tasks from changes to real repositories: an issue, the change that resolved it, and its tests."""
