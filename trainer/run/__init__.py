"""Everything around a run: its folder, checkpoints, metrics, terminal output and signals."""
