"""Weight updates: `WeightSync` on the driver, `Sender` on trainer ranks, `WeightsExtension` in
vLLM."""
