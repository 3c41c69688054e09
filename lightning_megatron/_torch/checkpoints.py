"""The index of torch's distributed checkpoints."""

from torch.distributed.checkpoint.filesystem import _StorageInfo

StorageInfo = _StorageInfo
"""Where the bytes of a chunk are, in the index of a distributed checkpoint (2.11-2.13)."""

DCP_METADATA_GLOBALS = frozenset(
    {
        *(
            ("torch.distributed.checkpoint.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                *("StorageMeta", "TensorProperties", "TensorStorageMetadata"),
                "_MEM_FORMAT_ENCODING",
            )
        ),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        # Where the writer of torch wrote; `pathlib._local` since Python 3.13.
        *((home, "PosixPath") for home in ("pathlib", "pathlib._local")),
    }
)
"""All that the pickled index of a distributed checkpoint refers to, beside dtypes (2.11-2.13).

Its reader unpickles it without restriction; ours allows these names only."""
