"""Who is where: degrees, rank coordinates, process groups and random streams."""
