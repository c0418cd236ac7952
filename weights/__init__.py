"""Sends new weights from the trainer to the engines. `WeightSync` runs on the driver, `Sender` on
the trainer's ranks, and `WeightsExtension` inside vLLM."""
