"""Questions whose answers lie deep in a corpus (`keel synthesize`, family `search`)."""
