"""The run folder: config, checkpoints, metrics, the panel, Ctrl-C."""
