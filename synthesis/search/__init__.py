"""Creates questions that need several documents from a corpus (`keel synthesize`, family
`search`)."""
