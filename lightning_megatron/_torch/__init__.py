"""Names of torch that are private, or differ between the versions that we support.

Every use of such a name stands in this package, with the versions it concerns and the reason, so
that a new torch release is met in one place. Others import from here, whichever file holds a name.
"""

from lightning_megatron._torch.collectives import gather_now as gather_now
from lightning_megatron._torch.collectives import reduce_scatter_now as reduce_scatter_now
from lightning_megatron._torch.collectives import start_all_gather as start_all_gather
from lightning_megatron._torch.collectives import start_reduce_scatter as start_reduce_scatter
from lightning_megatron._torch.collectives import watch_waits as watch_waits
from lightning_megatron._torch.dtensor import copy_hooks as copy_hooks
from lightning_megatron._torch.dtensor import forget_meshes as forget_meshes
from lightning_megatron._torch.dtensor import has_hooks as has_hooks
from lightning_megatron._torch.dtensor import has_storage as has_storage
from lightning_megatron._torch.dtensor import lend_gradients as lend_gradients
from lightning_megatron._torch.dtensor import mend_operation_keys as mend_operation_keys
from lightning_megatron._torch.dtensor import shard_of as shard_of
from lightning_megatron._torch.dtensor import shards_of as shards_of
from lightning_megatron._torch.dtensor import stamps as stamps
from lightning_megatron._torch.fsdp import accumulate_gradients as accumulate_gradients
from lightning_megatron._torch.fsdp import fill_missing_gradients as fill_missing_gradients
from lightning_megatron._torch.fsdp import gather_through as gather_through
from lightning_megatron._torch.fsdp import gathers_through as gathers_through
from lightning_megatron._torch.fsdp import (
    keep_reduced_gradients_wide as keep_reduced_gradients_wide,
)
from lightning_megatron._torch.fsdp import let_units_run_first as let_units_run_first
from lightning_megatron._torch.fsdp import move_outside_units as move_outside_units
from lightning_megatron._torch.fsdp import parameter_groups as parameter_groups
from lightning_megatron._torch.fsdp import reduce_gradients as reduce_gradients
from lightning_megatron._torch.graphs import WRAPPER_NAMES as WRAPPER_NAMES
from lightning_megatron._torch.graphs import CallersMode as CallersMode
from lightning_megatron._torch.graphs import (
    DisableTorchFunctionSubclass as DisableTorchFunctionSubclass,
)
from lightning_megatron._torch.graphs import EnableTorchFunction as EnableTorchFunction
from lightning_megatron._torch.graphs import TorchDispatchMode as TorchDispatchMode
from lightning_megatron._torch.graphs import (
    asks_classes as asks_classes,
)
from lightning_megatron._torch.graphs import break_graph as break_graph
from lightning_megatron._torch.graphs import (
    compare_memory_of_recomputed as compare_memory_of_recomputed,
)
from lightning_megatron._torch.graphs import compile_with_callers_only as compile_with_callers_only
from lightning_megatron._torch.graphs import current_function_mode as current_function_mode
from lightning_megatron._torch.graphs import keep_version as keep_version
from lightning_megatron._torch.graphs import next_sequence_number as next_sequence_number
from lightning_megatron._torch.graphs import register_list as register_list
from lightning_megatron._torch.graphs import runs_backward as runs_backward
from lightning_megatron._torch.graphs import runs_compiled_backward as runs_compiled_backward
from lightning_megatron._torch.graphs import sequence_number as sequence_number
from lightning_megatron._torch.graphs import tree_flatten as tree_flatten
from lightning_megatron._torch.graphs import tree_map as tree_map
from lightning_megatron._torch.graphs import tree_unflatten as tree_unflatten
from lightning_megatron._torch.groups import HashStore as HashStore
from lightning_megatron._torch.groups import PrefixStore as PrefixStore
from lightning_megatron._torch.groups import Store as Store
from lightning_megatron._torch.groups import TCPStore as TCPStore
from lightning_megatron._torch.groups import abandon_process_groups as abandon_process_groups
from lightning_megatron._torch.groups import default_store as default_store
from lightning_megatron._torch.groups import flight_recorder as flight_recorder
from lightning_megatron._torch.groups import group_ranks as group_ranks
from lightning_megatron._torch.groups import is_known as is_known
from lightning_megatron._torch.groups import known_groups as known_groups
from lightning_megatron._torch.groups import own_connection as own_connection
from lightning_megatron._torch.groups import restart_group_names as restart_group_names
from lightning_megatron._torch.groups import split_world as split_world
from lightning_megatron._torch.kernels import cpu_attention as cpu_attention
from lightning_megatron._torch.kernels import cpu_attention_backward as cpu_attention_backward
from lightning_megatron._torch.kernels import dump_allocations as dump_allocations
from lightning_megatron._torch.kernels import efficient_attention as efficient_attention
from lightning_megatron._torch.kernels import (
    efficient_attention_backward as efficient_attention_backward,
)
from lightning_megatron._torch.kernels import end_kernel_threads as end_kernel_threads
from lightning_megatron._torch.kernels import flash_attention as flash_attention
from lightning_megatron._torch.kernels import flash_attention_backward as flash_attention_backward
from lightning_megatron._torch.kernels import foreach_clamp_ as foreach_clamp_
from lightning_megatron._torch.kernels import foreach_functions as foreach_functions
from lightning_megatron._torch.kernels import foreach_lerp as foreach_lerp
from lightning_megatron._torch.kernels import foreach_lerp_ as foreach_lerp_
from lightning_megatron._torch.kernels import foreach_mul_ as foreach_mul_
from lightning_megatron._torch.kernels import foreach_norm as foreach_norm
from lightning_megatron._torch.kernels import foreach_sub_signs_ as foreach_sub_signs_
from lightning_megatron._torch.kernels import grouped_mm_operator as grouped_mm_operator
from lightning_megatron._torch.kernels import host_attention_operators as host_attention_operators
from lightning_megatron._torch.kernels import in_shape as in_shape
from lightning_megatron._torch.kernels import record_allocations as record_allocations
from lightning_megatron._torch.kernels import scaled_mm as scaled_mm
from lightning_megatron._torch.kernels import unscale_ as unscale_
from lightning_megatron._torch.loader import LoaderIterator as LoaderIterator
from lightning_megatron._torch.loader import StandInIterator as StandInIterator
from lightning_megatron._torch.loader import copy_with_indices as copy_with_indices
from lightning_megatron._torch.loader import end_queue as end_queue
from lightning_megatron._torch.loader import has_plain_iterators as has_plain_iterators
from lightning_megatron._torch.loader import replace_iterator as replace_iterator
from lightning_megatron._torch.safetensors_dtypes import SAFETENSORS_DTYPES as SAFETENSORS_DTYPES
from lightning_megatron._torch.state_dicts import DCP_METADATA_GLOBALS as DCP_METADATA_GLOBALS
from lightning_megatron._torch.state_dicts import AnyBatchNorm as AnyBatchNorm
from lightning_megatron._torch.state_dicts import IncompatibleKeys as IncompatibleKeys
from lightning_megatron._torch.state_dicts import StorageInfo as StorageInfo
from lightning_megatron._torch.state_dicts import call_as_tensor as call_as_tensor
from lightning_megatron._torch.state_dicts import describe_saved as describe_saved
from lightning_megatron._torch.state_dicts import first_load_hook as first_load_hook
from lightning_megatron._torch.state_dicts import first_state_hook as first_state_hook
from lightning_megatron._torch.state_dicts import is_fsdps as is_fsdps
from lightning_megatron._torch.state_dicts import loads_itself as loads_itself
from lightning_megatron._torch.state_dicts import saves_itself as saves_itself
from lightning_megatron._torch.state_dicts import state_hooks as state_hooks
from lightning_megatron._torch.state_dicts import tensor_without_memory as tensor_without_memory
from lightning_megatron._torch.state_dicts import tree_any as tree_any
from lightning_megatron._torch.wrappers import stand_in as stand_in
from lightning_megatron._torch.wrappers import without_modes as without_modes
from lightning_megatron._torch.wrappers import writes as writes
