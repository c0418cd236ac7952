"""A recipe of one's own from a few questions: `keel new`."""
