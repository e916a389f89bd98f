"""Data parallel training with Thunder: every rank holds all parameters, gradients are averaged."""
