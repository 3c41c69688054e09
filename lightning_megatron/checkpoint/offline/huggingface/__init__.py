"""Model directories of the Hugging Face library, to and from checkpoints."""
