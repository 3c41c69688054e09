"""What happens in a run: events, what each rank is doing, and what stays out of logs."""
