"""Features that notice faults and survive them, one package each."""
