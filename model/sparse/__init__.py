"""DeepSeek Sparse Attention, in which a small indexer selects the keys to attend to."""
