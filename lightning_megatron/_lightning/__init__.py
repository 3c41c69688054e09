"""Names of Lightning that are private, and what is replaced in the instances of a Trainer.

Every use of such a name stands in this package, with the reason and with what would make it
unnecessary, so that a new release of Lightning is met in one place. Of the names, 2.6.4, 2.6.5 and
2.6.6 have the same source, but where it is said; ``tests/_lightning`` tells what a release has
changed.

No class and no module of Lightning's is changed. Replaced are, in the instances that belong to the
Trainer of a run:

* ``trainer._signal_connector``, by handlers that note a signal and communicate nothing;
* ``on_advance_end`` of the fit loop and of its ``epoch_loop``: Lightning's own runs within, and the
  run may end before or after it;
* ``_broadcast_sigterm_tensor`` of the ``epoch_loop``, by nothing;
* ``_get_monitor_value`` of the ``epoch_loop``, by the mean over the ranks;
* ``sync`` of torchmetrics' ``Metric``, the one class that is changed, while a layout lasts;
* ``log`` of the module, while a step runs on microbatches;
* ``_summary`` and ``summarize`` of ModelSummary callbacks, where a rank holds a part of the module;
* the methods of loggers, with the callback LoggerGuard only;
* ``process_dataloader`` of the strategy, with the callback WorkerGuard only.

Replaced for the process are ``available_strategies`` and ``get`` of the registries of strategies,
which then know names of layouts.

Values are set that have no public setter, or none that holds:

* ``_device_mesh`` of the module, and ``inference_mode`` of the loops that evaluate;
* ``use_distributed_sampler``, as the strategy divides the data;
* the path of the checkpoint that is shown;
* in a run that is resumed, ``_restarting`` and the progress of the loops;
* the sums of ``self.log``, where a batch is left out;
* the launcher's ``procs``, which are emptied when a run ends early.
"""
