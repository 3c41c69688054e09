"""Names of Lightning that are private, and what is replaced in the instances of a Trainer.

Every use of such a name stands in this package, with the reason and with what would make it
unnecessary, so that a new release of Lightning is met in one place. Others import from here,
whichever file holds a name; `cli` alone is imported by its own, as it needs jsonargparse. Of the
names, 2.6.4, 2.6.5 and 2.6.6 have the same source, but where it is said; ``tests/_lightning`` tells
what a release has changed.

No class and no module of Lightning's is changed. Replaced are, in the instances that belong to the
Trainer of a run:

* ``trainer._signal_connector``, by handlers that note a signal and communicate nothing;
* ``on_advance_end`` of the fit loop and of its ``epoch_loop``: Lightning's own runs within, and the
  run may end before or after it;
* ``_broadcast_sigterm_tensor`` of the ``epoch_loop``, by nothing;
* ``_get_monitor_value`` of the ``epoch_loop``, by the mean over the ranks;
* ``log`` of the module, while a step runs on microbatches;
* ``_summary`` and ``summarize`` of ModelSummary callbacks, where a rank holds a part of the module;
* the methods of loggers, with the callback LoggerGuard only;
* ``process_dataloader`` of the strategy, with the callback WorkerGuard only.

Values are set that have no public setter, or none that holds:

* ``_device_mesh`` of the module, and ``inference_mode`` of the loops that evaluate;
* ``use_distributed_sampler``, as the strategy divides the data;
* the path of the checkpoint that is shown;
* in a run that is resumed, ``_restarting`` and the progress of the loops;
* the sums of ``self.log``, where a batch is left out;
* the launcher's ``procs``, which are emptied when a run ends early.
"""

from lightning_megatron._lightning.connectors import cluster_environment as cluster_environment
from lightning_megatron._lightning.connectors import collect_checkpoint as collect_checkpoint
from lightning_megatron._lightning.connectors import divide_data as divide_data
from lightning_megatron._lightning.connectors import divides_data as divides_data
from lightning_megatron._lightning.connectors import requeue_path as requeue_path
from lightning_megatron._lightning.connectors import show_checkpoint_path as show_checkpoint_path
from lightning_megatron._lightning.hooks import PrecisionAroundClosure as PrecisionAroundClosure
from lightning_megatron._lightning.hooks import call_module_hook as call_module_hook
from lightning_megatron._lightning.hooks import is_of_hyper_parameters as is_of_hyper_parameters
from lightning_megatron._lightning.hooks import keep_precision as keep_precision
from lightning_megatron._lightning.hooks import set_device_mesh as set_device_mesh
from lightning_megatron._lightning.hooks import synchronizes_batch_norm as synchronizes_batch_norm
from lightning_megatron._lightning.hooks import trainer_of as trainer_of
from lightning_megatron._lightning.launch import LauncherBase as LauncherBase
from lightning_megatron._lightning.launch import LaunchingStrategy as LaunchingStrategy
from lightning_megatron._lightning.launch import ScriptLauncher as ScriptLauncher
from lightning_megatron._lightning.launch import callback_states as callback_states
from lightning_megatron._lightning.launch import default_backend as default_backend
from lightning_megatron._lightning.launch import destroy_group_at_exit as destroy_group_at_exit
from lightning_megatron._lightning.launch import forget_launcher as forget_launcher
from lightning_megatron._lightning.launch import is_interactive as is_interactive
from lightning_megatron._lightning.launch import limit_threads as limit_threads
from lightning_megatron._lightning.launch import run_as_entry_point as run_as_entry_point
from lightning_megatron._lightning.launch import take_children as take_children
from lightning_megatron._lightning.loaders import Stateful as Stateful
from lightning_megatron._lightning.loaders import discard_batches as discard_batches
from lightning_megatron._lightning.loaders import evaluation_source as evaluation_source
from lightning_megatron._lightning.loaders import forget_loader_states as forget_loader_states
from lightning_megatron._lightning.loaders import makes_training_loader as makes_training_loader
from lightning_megatron._lightning.loaders import read_anew as read_anew
from lightning_megatron._lightning.loaders import repeats_short_loaders as repeats_short_loaders
from lightning_megatron._lightning.loaders import (
    replace_predicted_batches as replace_predicted_batches,
)
from lightning_megatron._lightning.loaders import training_fetcher as training_fetcher
from lightning_megatron._lightning.loaders import training_loader as training_loader
from lightning_megatron._lightning.loaders import training_source as training_source
from lightning_megatron._lightning.loaders import with_sampler as with_sampler
from lightning_megatron._lightning.loops import avoid_inference_mode as avoid_inference_mode
from lightning_megatron._lightning.loops import batch_progress as batch_progress
from lightning_megatron._lightning.loops import begin_next_epoch as begin_next_epoch
from lightning_megatron._lightning.loops import broadcast_no_signals as broadcast_no_signals
from lightning_megatron._lightning.loops import count_batches_anew as count_batches_anew
from lightning_megatron._lightning.loops import end_batch as end_batch
from lightning_megatron._lightning.loops import end_epoch as end_epoch
from lightning_megatron._lightning.loops import epoch_counts as epoch_counts
from lightning_megatron._lightning.loops import evaluation_loop as evaluation_loop
from lightning_megatron._lightning.loops import is_last_batch as is_last_batch
from lightning_megatron._lightning.loops import replace_end_of_batch as replace_end_of_batch
from lightning_megatron._lightning.loops import replace_end_of_epoch as replace_end_of_epoch
from lightning_megatron._lightning.loops import replace_monitored_value as replace_monitored_value
from lightning_megatron._lightning.loops import runs_last_batch as runs_last_batch
from lightning_megatron._lightning.loops import say_validation_has_begun as say_validation_has_begun
from lightning_megatron._lightning.loops import shift_batch_counts as shift_batch_counts
from lightning_megatron._lightning.loops import take_batches_back as take_batches_back
from lightning_megatron._lightning.loops import take_epoch_back as take_epoch_back
from lightning_megatron._lightning.loops import validates_after_batch as validates_after_batch
from lightning_megatron._lightning.loops import validates_first as validates_first
from lightning_megatron._lightning.results import UPDATE_COUNT as UPDATE_COUNT
from lightning_megatron._lightning.results import count_first_update as count_first_update
from lightning_megatron._lightning.results import count_update as count_update
from lightning_megatron._lightning.results import forget_computed as forget_computed
from lightning_megatron._lightning.results import initial_states as initial_states
from lightning_megatron._lightning.results import replaced_log as replaced_log
from lightning_megatron._lightning.results import set_value_on_batch as set_value_on_batch
from lightning_megatron._lightning.results import training_sums as training_sums
from lightning_megatron._lightning.results import uploads_checkpoints as uploads_checkpoints
from lightning_megatron._lightning.results import value_on_batch as value_on_batch
from lightning_megatron._lightning.saving import module_from as module_from
from lightning_megatron._lightning.signals import SignalConnector as SignalConnector
from lightning_megatron._lightning.signals import chain_of as chain_of
from lightning_megatron._lightning.signals import parts_of_chain as parts_of_chain
from lightning_megatron._lightning.signals import (
    replace_signal_connector as replace_signal_connector,
)
from lightning_megatron._lightning.signals import signal_connector as signal_connector
from lightning_megatron._lightning.summary import Summary as Summary
from lightning_megatron._lightning.summary import format_table as format_table
from lightning_megatron._lightning.summary import replace_printing as replace_printing
from lightning_megatron._lightning.summary import replace_summary as replace_summary
from lightning_megatron._lightning.summary import restore_summary as restore_summary
from lightning_megatron._lightning.summary import summary_depth as summary_depth
from lightning_megatron._lightning.warnings import hide_pytree_warning as hide_pytree_warning
from lightning_megatron._lightning.warnings import hide_resuming_warning as hide_resuming_warning
