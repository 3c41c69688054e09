"""How the package is built, in figures: what a reader has to know, and what grew.

The measure is mechanisms before lines: a mechanism is something that a reader must know to predict
what a line of his code does. `mechanisms` and `size` count them in the source of a checkout,
`step` traces one training step on four ranks, and `watchers` measures, on demand, what the parts
that look at user code cost in a step::

    python -m benchmarks.house                              # this checkout
    python -m benchmarks.house --root ../other              # another one
    python -m benchmarks.house --against benchmarks/results/house-4e62d9a.json
    python -m benchmarks.house --watchers --output benchmarks/results

The third compares with a record, and names what is new and what is gone. What is counted by a
heuristic says so in the table.
"""
