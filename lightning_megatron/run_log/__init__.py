"""Log of a run: its events, the section that each rank is in, and secrets to leave out."""
