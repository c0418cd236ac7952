"""The HTML page of a run, shown by `keel report` and `keel watch`."""
