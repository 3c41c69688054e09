"""Attention of a sequence whose positions are spread over the ranks of the cp axis.

Each rank holds the queries, keys and values of its part (`topology.context_layout`). A query sees
keys that other ranks hold, so every kind of attention here moves something:

* `ring`: keys and values travel from neighbour to neighbour, a block at a time;
* `gather`: every rank collects all keys and values at once;
* `ulysses`: an all-to-all makes of part of the sequence and all heads the whole sequence and part
  of the heads; with ``ContextConfig(ulysses=)`` a ring passes around what such a group holds.

`call` is the entrance, `operator` the one operator that a call is for autograd, recomputation and
compilers, `plan` says by positions which products of blocks there are, `kernels` computes one of
them, and `partial_sums` adds them up.
"""
