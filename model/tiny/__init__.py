"""A small mixture-of-experts model that is built and trained locally, without downloads."""
