"""The RL algorithm: losses, advantages, masks, packing, and the data types passed between pipeline
stages. It uses only torch and numpy, and does not depend on Ray, vLLM, DeepSpeed or transformers.
"""
