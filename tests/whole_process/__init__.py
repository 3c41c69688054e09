"""Tests that train in pytest's own process: last, as no worker can be forked from it afterwards."""
