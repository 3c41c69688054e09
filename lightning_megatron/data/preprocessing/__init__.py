"""Text to tokens on disk: `lightning-megatron preprocess`, and `preprocess` for programs.

* `sources`: files that are read, their content hashes, and where they may be cut
* `records`: documents of a piece of a file
* `parts`: pieces of files that make up each shard
* `tokenizer`: tokenizer of a directory, and its identity
* `work`: one part of the text becomes one shard
* `workers`: processes that share the parts
* `run`: the output directory: what is done, what is left, what does not fit together
"""
