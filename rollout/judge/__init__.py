"""Runs the judge model on a vLLM server that starts and ends with the run."""
