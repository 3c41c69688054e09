"""Places of a module's parameters: what part of each this rank has (`whole.weights`)."""

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_megatron.topology.mesh import Topology
from lightning_megatron.whole.places import Place
from lightning_megatron.whole.stage_weights import StageWeights
from lightning_megatron.zero.gradients import GradientSet, ParameterRole


def weight_places(
    gradients: GradientSet, stages: StageWeights | None = None
) -> list[tuple[nn.Parameter, Place]]:
    """Return the parameters of which this rank has a part, or one of several copies, and where.

    Args:
        gradients: with the parameters.
        stages: weights of all stages of a pipeline; None without one.
    """
    found: list[tuple[nn.Parameter, Place]] = []
    for role in gradients.roles:
        place = place_of_role(role, gradients.topology)
        if stages is not None and not role.outside and role.name in stages.names:
            place = replace(place, stages=stages, owner=stages.known(role.name).owner)
        if place.is_cut or place.copies > 1 or place.stages is not None:
            found.append((role.parameter, place))
    return found


def place_of_role(role: ParameterRole, topology: Topology) -> Place:
    """Return the place of a parameter, but for its stage."""
    shard, layer = role.shard, role.axes(topology).layer
    cut = shard is not None and shard.dim is not None and layer.size > 1
    weight = role.parameter
    rows = weight if isinstance(weight, DTensor) else None
    learners = layer.group if cut and layer is topology.ep else None
    summed = shard is not None and shard.sum_gradients and topology.tp.size > 1
    return Place(
        name=role.name,
        topology=topology,
        shape=torch.Size(weight.shape if shard is None else shard.full_shape),
        shard=shard,
        axis=layer if cut else None,
        rows=rows,
        copies=topology.tp.size if summed else 1,
        learners=learners if rows is None else topology.loss.group,
    )
