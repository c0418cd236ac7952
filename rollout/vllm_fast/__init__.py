"""What takes the place of vLLM's scheduler, sampler and route capture on GPUs."""
