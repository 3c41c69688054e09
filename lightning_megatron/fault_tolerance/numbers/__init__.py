"""Bad numbers: `NumberGuard`, loss spikes, and the responses to them."""
