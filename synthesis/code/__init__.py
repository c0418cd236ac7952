"""Tasks from changes to real repositories: an issue, the change that answered it, and its tests."""
