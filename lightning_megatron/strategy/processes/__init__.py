"""The processes of this machine: how they are launched and connected."""
