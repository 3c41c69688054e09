"""The checkpoint directory: manifests, hashes, commit, discovery and retention."""
