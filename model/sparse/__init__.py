"""DeepSeek Sparse Attention: attention to the keys that a small indexer selects."""
