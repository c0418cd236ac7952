"""Questions that need several documents of a corpus (`keel synthesize`, family `search`)."""
