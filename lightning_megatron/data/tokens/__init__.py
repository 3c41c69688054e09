"""Token numbers on disk: pairs of files, their manifest, and a corpus of many pairs.

* `lightning_megatron.data.tokens.indexed`: one pair PREFIX.bin, PREFIX.idx, read and written
* `lightning_megatron.data.tokens.manifest`: what a directory of pairs holds, and who made it
* `lightning_megatron.data.tokens.corpus`: many pairs that read like one
"""
