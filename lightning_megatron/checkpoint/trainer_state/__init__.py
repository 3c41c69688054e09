"""The part of a checkpoint that is not a shard: ``state.json`` and its tensors."""
