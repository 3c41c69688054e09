"""Mixtures of experts: routers, the exchange of tokens, and stacks of experts.

=================  ===============================================================================
file               what it holds
=================  ===============================================================================
`config`           options of a router; arithmetic only
`tokens`           which tokens of which sequences a rank routes
`routing`          choice of experts: a pure function of the logits
`router`           the layer that computes logits, chooses, and counts
`decisions`        what a recomputation takes over from the forward
`auxiliary`        auxiliary losses that reach the gradient without a line in ``training_step``
`auxiliary_loss`   their sum, for a ``training_step`` that adds it itself
`bias`             update of the routers' biases after optimizer steps
`grouped`          products of groups of rows with a stack of matrices
`expert_mlp`       the MLPs of several experts as one autograd node
`stack`            the experts of a layer as stacked weights, spread over ep
`dispatch`         exchange of tokens between the ranks that have them and those of experts
`dispatch_choice`  bytes of each way to do so, and which one ``auto`` takes
`row_parts`        rows that tp ranks hold alike, divided among them
`row_sums`         rows that are copied to several places, and added up again
`mixture`          `MixtureOfExperts`, which replaces an `MLP`
=================  ===============================================================================
"""
