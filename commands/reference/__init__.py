"""What every knob and every metric means: `keel knobs`, docs/knobs.md and docs/metrics.md."""
