"""Lightning callbacks; they never import a strategy."""
