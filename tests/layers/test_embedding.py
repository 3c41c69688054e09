import pytest
import torch

from lightning_megatron.errors import ConfigError
from lightning_megatron.layers.embedding import PositionEmbedding, VocabParallelEmbedding
from tests.layers.parity import close, make_topology


def _positions(tp):
    topology = make_topology(tp, sequence_parallel=True)
    plain, parallel = PositionEmbedding(8, 4), PositionEmbedding(8, 4)
    parallel.load_state_dict(plain.state_dict())
    parallel.distribute(topology)
    assert parallel.tensor_shards["weight"].sum_gradients
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for positions in (None, torch.arange(8).flip(0), torch.randint(0, 8, (2, 8))):
        if positions is not None:
            torch.distributed.broadcast(positions, 0)
        expected = plain(tokens, positions)
        dim = expected.dim() - 2
        close("positions", parallel(tokens, positions), expected.chunk(tp, dim)[topology.tp.rank])


def test_position_embedding_follows_the_sequence_split(pool):
    pool.run(2, _positions, 2)


def _indivisible(tp):
    topology = make_topology(tp, sequence_parallel=True)
    embedding = VocabParallelEmbedding(16, 4)
    embedding.distribute(topology)
    with pytest.raises(ConfigError, match=r"sequence length=7, tp=2: .*nearest valid: .*6 or 8"):
        embedding(torch.zeros(2, 7, dtype=torch.long))


def test_indivisible_sequence_is_refused(pool):
    pool.run(2, _indivisible, 2)
