"""Generators of pipeline schedules, one file for each family.

* `breadth_first`: gpipe and breadth-first
* `one_f_one_b`: 1f1b and interleaved
* `zero_bubble`: zb-h1 and zb-h2
* `v_shaped`: zbv, v-half and v-min
* `dual_pipe`: dualpipev
* `table`: schedules read from a file

A generator takes the number of ranks and of microbatches, each at least 1 and otherwise free of any
rule, and returns a row of actions for every rank. `weights` fills the second halves of split
backwards into rows of the other actions. Users call `make_schedule` (`schedules.schedule`).
"""
