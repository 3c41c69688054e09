"""Mechanisms that notice and survive faults; none of them knows Lightning."""
