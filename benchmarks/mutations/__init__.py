"""Mutations of the package, and which tests find them: ``python -m benchmarks.mutations``.

A mutation is one small defect: a comparison flipped, a number or a slice off by one, a wait
dropped, operands swapped, a statement removed, a condition negated, ``and`` for ``or``. A seed
draws them; the kinds take turns, and within a kind every place of the package is equally likely.
One after the other is put into a copy of the checkout, and tests run until one fails. Which tests,
and in what order:

1. the tests of the mutated file: its doctests, those named after it, those that import it, and the
   same of the files that import it; those whose names have a word of its name;
2. the other tests of its folder;
3. those that train whole models (`CORE` in ``choice.py``).

A budget of processor time is divided between the three, and between the files of each: of a file
that uses up its share, the next cases are left out. A survivor has survived these tests and no
others; the record says which of their cases ran.

One process imports what tests need, but not the package, and forks a child for every run of pytest.
A failure counts if the test passes without the mutation and fails with it once more. A test hangs
if it does not end within ``--hang`` seconds, nor in twice the time when it is tried again, although
it does so without the mutation. A process that adopts orphans watches each child, and kills
whatever the child has left behind.

The record is written after every mutation. ``--resume RECORD`` goes on with a series that was cut
off. ``--again RECORD`` applies the mutations of a record to this checkout, whose lines may have
moved, tries the test that killed each first, and ends with those that were killed and survive now.
"""
