"""Fully sharded data parallel training with Thunder: every rank holds a shard of all parameters."""
