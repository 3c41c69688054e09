from hypothesis import given
from hypothesis import strategies as st

from lightning_megatron.checkpoint.directory.chunk_runs import Run, compress
from lightning_megatron.checkpoint.directory.coverage import expand
from lightning_megatron.checkpoint.directory.manifest import _run


def rectangles(runs):
    return sorted((part, (o, run.sizes)) for run in runs for part, o in run.rectangles())


def expanded(runs, dimensions):
    arrays = (array.tolist() for array in expand(runs, dimensions))
    return sorted((p, (tuple(o), tuple(s))) for p, o, s in zip(*arrays, strict=True))


@st.composite
def chunks(draw):
    """Rectangles that follow no rule, or several."""
    dimensions = draw(st.integers(0, 3))
    corners = st.tuples(*[st.integers(0, 6)] * dimensions)
    sizes = st.tuples(*[st.integers(0, 3)] * dimensions)
    offsets = draw(st.lists(corners, unique=True, max_size=20))
    return dimensions, [(draw(st.integers(0, 9)), (o, draw(sizes))) for o in offsets]


@given(chunks())
def test_nothing_is_lost_or_added(given_):
    dimensions, found = given_
    runs = compress(found)
    assert rectangles(runs) == expanded(runs, dimensions) == sorted(found)
    assert sum(run.count for run in runs) == len(found)
    assert tuple(map(_run, (run.plain() for run in runs))) == runs


def grid(tp, dp, shape, tp_dim):
    """The parts of a tensor that tp cuts along one dimension and ZeRO along the first."""
    found = []
    slice_shape = [n // tp if d == tp_dim else n for d, n in enumerate(shape)]
    rows = -(-slice_shape[0] // dp)
    for d in range(dp):
        for t in range(tp):
            offsets = [0, 0]
            offsets[tp_dim] += t * slice_shape[tp_dim]
            begin = min(d * rows, slice_shape[0])
            offsets[0] += begin
            sizes = (min(rows, slice_shape[0] - begin), slice_shape[1])
            if sizes[0]:
                found.append((d * tp + t, (tuple(offsets), sizes)))
    return found


def test_layouts_are_few_runs():
    for shape in ((4096, 1024), (4100, 1024), (11008, 4096), (50304, 768)):
        for tp_dim in (0, 1):
            found = grid(8, 128, shape, tp_dim)
            runs = compress(found)
            assert rectangles(runs) == sorted(found)
            assert len(runs) <= 2 * 8, (shape, tp_dim, len(runs), len(found))


def test_a_run_of_one_is_short():
    assert [run.plain() for run in compress([(3, ((), ()))])] == [[3, [], []]]
    assert compress([]) == ()
    assert Run(part=0, offsets=(), sizes=()).count == 1
