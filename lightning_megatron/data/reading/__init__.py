"""Reading of samples: who reads which, in which order, and where a run goes on."""
