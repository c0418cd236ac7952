"""DeepSeek Sparse Attention: a small indexer selects the keys to attend to."""
