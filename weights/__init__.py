"""Send new weights from the trainer to the engines. `push_weights` runs on the driver, `Sender` on
the trainer ranks, and `WeightsExtension` inside vLLM."""
