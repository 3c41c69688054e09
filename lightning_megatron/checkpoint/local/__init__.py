"""Local checkpoints: on the disks of the machines, each with a copy on another machine."""
