"""Layers of torch that a layout or precision would turn into something else.

Most plain layers run anywhere, on gathered parameters. These do not: they write into their
parameters in the forward, where it is a copy, or a part of the samples, that they see; or their
gradients cannot be added up over ranks; or nobody knows yet how large they are.
"""

from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from lightning_megatron._torch import has_hooks
from lightning_megatron.layers.base import ParallelLayer

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def layer_problems(module: nn.Module, *, alone: bool, tp: int = 1) -> list[str]:
    """Sentences about the layers inside ``module``.

    Args:
        module: the whole network.
        alone: whether each parameter is on one data-parallel rank, and used as it is.
        tp: ranks that share parallel layers.
    """
    problems = []
    for name, layer in module.named_modules():
        if tp > 1 and isinstance(layer, ParallelLayer):
            own = dict(layer.named_parameters(recurse=False))
            problems += [
                f"{name}.{leaf}: Tensor.register_hook on a parameter that tp={tp} slices, of whose "
                "gradient each rank has a part; nearest valid: tp=1, or a layer of torch.nn"
                for leaf in layer.shard_dims()
                if leaf in own and has_hooks(own[leaf])
            ]
        if has_unknown_sizes(layer):
            problems.append(
                f"{name or type(layer).__name__}: parameters of unknown size (a lazy layer that "
                "has not run) cannot be spread; nearest valid: the layer with its sizes, or one "
                "call of the network on an example before the Trainer starts"
            )
        if alone or not isinstance(layer, EMBEDDINGS):
            continue
        if layer.max_norm is not None:
            problems.append(
                f"{name}: max_norm={layer.max_norm} writes into the weights in the forward, which "
                "are copies here, or would differ from rank to rank; nearest valid: max_norm=None"
            )
        if layer.sparse:
            problems.append(
                f"{name}: sparse=True makes gradients that are not added up over ranks; nearest "
                "valid: sparse=False"
            )
    return problems


def has_unknown_sizes(module: nn.Module) -> bool:
    """Whether ``module`` itself has parameters or buffers without a shape."""
    own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(isinstance(t, UninitializedParameter | UninitializedBuffer) for t in own)
