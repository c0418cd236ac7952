"""The HTML page of a run: `keel report` and `keel watch`."""
