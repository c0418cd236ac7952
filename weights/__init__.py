"""Send new weights from the trainer to the engines. `WeightSync` runs on the driver, `Sender` on
the trainer ranks, and `WeightsExtension` inside vLLM."""
