"""Silent data corruption: `ReplicaCheck` compares copies of weights bit for bit."""
