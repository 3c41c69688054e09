"""The checkpoint directory on disk: manifests, hashes, publishing, discovery and retention."""
