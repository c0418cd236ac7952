"""What `keel synthesize` makes, a section for each family of tasks."""
