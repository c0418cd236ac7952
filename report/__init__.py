"""What a run was like, as one page: `keel report` and `keel watch`."""
