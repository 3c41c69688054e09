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


def _foreign_tokens(tp, sequence_parallel):
    topology = make_topology(tp, sequence_parallel)
    for num_tokens, tokens in ((16, (16, 40, -1, -16)), (13, (13, 15, 16, -1))):
        embedding = VocabParallelEmbedding(16, 4, num_tokens=num_tokens)
        embedding.distribute(topology)
        for token in tokens:
            with pytest.raises(IndexError, match="index out of range"):
                embedding(torch.tensor([[0, num_tokens - 1], [token, 1]]))
        assert embedding(torch.tensor([[0, num_tokens - 1]])).isfinite().all()


@pytest.mark.parametrize("tp", [1, 2])
def test_tokens_outside_the_vocabulary_are_refused_as_by_torch(pool, tp):
    pool.run(tp, _foreign_tokens, tp, tp > 1)


def test_padding_lies_within_the_vocabulary():
    with pytest.raises(ConfigError, match="num_tokens=17, num_embeddings=16: .*num_tokens=16"):
        VocabParallelEmbedding(16, 4, num_tokens=17)
