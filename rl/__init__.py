"""The algorithm: losses, advantages, masks, packing and the types that the stages exchange.

The code uses only torch and numpy, and does not depend on Ray, vLLM, DeepSpeed or transformers.
"""
