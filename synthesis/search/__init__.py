"""Creates questions that need several documents of a corpus (`keel synthesize`, family
`search`)."""
