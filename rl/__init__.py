"""The RL algorithm: losses, advantages, masks, packing, and the data types passed between pipeline
stages, with limits for stopping processes. It uses only torch and numpy, not Ray, vLLM, DeepSpeed
or transformers."""
