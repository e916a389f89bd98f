"""Thunder models that run on PyTorch's own kernels where Thunder takes operators apart."""
