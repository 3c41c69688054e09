"""All state of a checkpoint that is not in shards: ``state.json`` and its tensors."""
