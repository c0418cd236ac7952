"""Runs the judge model on a vLLM server that starts and stops with the run."""
