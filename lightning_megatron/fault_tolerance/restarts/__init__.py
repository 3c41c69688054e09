"""Restarts: `RestartPolicy` ends a run that fails again and again at the same step."""
