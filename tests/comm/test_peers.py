import pytest
import torch
import torch.distributed as dist

from lightning_megatron.comm.peers import Peers
from lightning_megatron.errors import CheckpointError, ConfigError
from lightning_megatron.topology.axis import Axis


def test_alone_the_value_goes_through_both_parts():
    assert Peers().run("adding", lambda: 1, lambda values: [*values, 2]) == [1, 2]


def test_error_says_what_was_being_done():
    with pytest.raises(CheckpointError, match=r"^counting: ZeroDivisionError: ") as info:
        Peers().run("counting", lambda: 1 / 0, len)
    assert isinstance(info.value.__cause__, ZeroDivisionError)
    with pytest.raises(CheckpointError, match="^counting: ZeroDivisionError"):
        Peers().run("counting", lambda: 1, lambda values: 1 / 0)


def test_config_error_and_interrupt_stay_what_they_are():
    def interrupt():
        raise KeyboardInterrupt

    def mistake():
        raise ConfigError(["a", "b"])

    with pytest.raises(KeyboardInterrupt):
        Peers().run("waiting", interrupt, len)
    with pytest.raises(ConfigError) as info:
        Peers().run("checking", mistake, len)
    assert info.value.problems == ("a", "b")


def job(use_group):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([1, 2]) if use_group else None
    if use_group and rank == 0:
        return None
    peers = Peers(group)
    out = [peers.rank, peers.broadcast(f"from {rank}"), peers.run("x", lambda: rank, list)]

    def each():
        if rank:
            raise ConfigError([f"fault {rank}", "both"])

    with pytest.raises(CheckpointError, match="ZeroDivisionError"):
        peers.run("dividing", lambda: rank, lambda values: [v / 0 for v in values])
    values = peers.all_gather(rank), peers.gather(rank), peers.broadcast(rank, 1)
    votes = [peers.vote(rank == 1, torch.device("cpu"), all=every) for every in (False, True)]
    out.append((values, votes, peers.exchange([rank, 2.5])))
    for attempt in (each, lambda: 1 / (2 - rank)):
        try:
            peers.run("trying", attempt, list)
        except (ConfigError, CheckpointError) as error:
            out.append((type(error).__name__, str(error)))
    return out


def test_ranks_agree(pool):
    results = pool.run(3, job, False)
    for rank, (own, shared, values, exchanged, config, other) in enumerate(results):
        at_first = [0, 1, 2] if rank == 0 else None
        assert exchanged[0] == ([0, 1, 2], at_first, 1)
        assert exchanged[1] == [True, False]
        assert exchanged[2] == [(0.0, 1.0, 2.0), (2.5, 2.5, 2.5)]
        assert (own, shared, values) == (rank, "from 0", [0, 1, 2])
        assert config[0] == "ConfigError"
        assert all(text in config[1] for text in ("fault 1", "fault 2", "3. fault 2"))
        assert other == ("CheckpointError", "trying: rank 2: ZeroDivisionError: division by zero")


def test_ranks_of_a_group_agree_without_the_others(pool):
    none, first, second = pool.run(3, job, True)
    assert none is None
    assert first[:3] == [0, "from 1", [1, 2]]
    assert second[:3] == [1, "from 1", [1, 2]]


def same_job(kind):
    dist.init_process_group("gloo")
    peers = Peers(dist.new_group([1, 2, 3, 4, 5]) if kind == "some ranks" else None)
    if kind == "some ranks" and dist.get_rank() == 0:
        return None
    said = {"all": "same", "half": peers.rank // 3, "own": peers.rank}
    seen, sent = [], []

    def fail():
        if peers.rank == 2:
            raise CheckpointError("no room")

    send = dist.send_object_list

    def count(objects, **to):
        sent.append(objects[0].value)
        send(objects, **to)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_megatron.comm.peers._FEW_RANKS", 2)
        patch.setattr(dist, "send_object_list", count)
        seen += [peers.run("trying", lambda v=v: v, list) for v in said.values()]
        with pytest.raises(CheckpointError) as info:
            peers.run("trying", fail, list)
    return [*seen, str(info.value)], sent


def axis_job():
    dist.init_process_group("gloo")
    axis = Axis(name="x", rank=0, ranks=(2, 0, 1), group=dist.new_group([0, 1, 2]))
    alone = Peers.over(Axis(name="y", rank=0, ranks=(dist.get_rank(),), group=None))
    return Peers.over(axis).all_gather(dist.get_rank()), alone.all_gather(dist.get_rank())


def test_values_of_an_axis_come_in_its_order(pool):
    assert pool.run(3, axis_job) == [([2, 0, 1], [rank]) for rank in range(3)]


def texts_job():
    dist.init_process_group("gloo")
    peers = Peers()
    texts = [f"{peers.rank}>{other}".encode() * (peers.rank * other) for other in range(2)]
    taken = peers.deliver(texts)
    answers = [text * 2 for text in taken] or [b""] * peers.size
    return taken, peers.hand_out(answers, 2), peers.deliver([b""]), peers.hand_out([b""] * 4, 4)


def test_texts_of_any_length_go_to_some_ranks_and_back(pool):
    for rank, (taken, answers, *nothing) in enumerate(pool.run(4, texts_job)):
        if rank < 2:
            assert taken == [f"{other}>{rank}".encode() * (other * rank) for other in range(4)]
        else:
            assert taken == []
        assert answers == [f"{rank}>{other}".encode() * (2 * rank * other) for other in range(2)]
        assert nothing == [[b""] * 4 if rank == 0 else [], [b""] * 4]
    alone = Peers(alone=True)
    assert alone.deliver([b"x"]) == alone.hand_out([b"x"], 1) == [b"x"]


@pytest.mark.parametrize("kind", ["default group", "some ranks"])
def test_what_ranks_have_in_common_travels_once(pool, kind):
    results = [result for result in pool.run(6, same_job, kind) if result is not None]
    size = len(results)
    halves = [rank // 3 for rank in range(size)]
    expected = [["same"] * size, halves, list(range(size)), "trying: rank 2: no room"]
    assert all(seen == expected for seen, _ in results)
    # The first one's own goes nowhere, and what all differ in is gathered at once.
    assert [sent for _, sent in results if sent] == [[None], [1]]
