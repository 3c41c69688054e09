"""Silent data corruption: `ReplicaCheck` compares copies of weights bit by bit."""
