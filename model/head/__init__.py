"""The computations of the support head (`keel.model.logprobs`) on CPUs and GPUs."""
