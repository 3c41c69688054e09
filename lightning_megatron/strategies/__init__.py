"""The Lightning face of the library: hooks that delegate downwards."""
