"""Recorders and records by themselves: labels, what leaves a transform, and how it is joined."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.owners import object_paths
from nnxlite._core.recording import Recorder
from nnxlite._core.records import (
    Bundle,
    ById,
    Key,
    Record,
    Stranger,
    Wanted,
    append,
    only,
    same,
    shapes_of,
)
from nnxlite.errors import TraceLevelError

X = jnp.arange(3, dtype=jnp.float32)
INTERMEDIATE = Wanted((nnx.Intermediate,))


class Leaf(nnx.Module):
    pass


class Other(nnx.Module):
    pass


# Records.


def test_place_of_a_kind_is_the_nearest_that_is_wanted():
    class Norm(nnx.Intermediate):
        pass

    assert INTERMEDIATE.place_of(Norm) is nnx.Intermediate
    assert Wanted((nnx.Intermediate, Norm)).place_of(Norm) is Norm
    assert INTERMEDIATE.place_of(nnx.Perturbation) is None
    assert INTERMEDIATE.place_of(nnx.Cache) is None
    assert Wanted((nnx.Perturbation,)).place_of(nnx.Perturbation) is nnx.Perturbation


@pytest.mark.parametrize(
    ("reduce", "start", "values", "joined"),
    [
        (append, (), (1, 2, 3), (1, 2, 3)),
        (only, None, (5,), 5),
        (lambda total, x: total + x, 100, (1, 2, 3), 106),
    ],
)
def test_joining_inside_and_outside_gives_the_same(reduce, start, values, joined):
    record = Record(nnx.Intermediate, reduce, start, ())
    assert record.joined_to(values).start == joined
    waiting = record.with_more(values[:1])
    for value in values[1:]:
        waiting = waiting.with_more((value,))
    assert record.joined_to(waiting.values).start == joined


def test_perturbations_of_one_name_are_one():
    assert same(None, X) is X
    assert same(X, X + 1) is X
    with pytest.raises(ValueError, match=r"shapes \(\(3,\), 'float32'\) and \(\(1,\), 'float32'\)"):
        same(X, X[:1])
    record = Record(nnx.Perturbation, same, None, ())
    assert record.with_more((X,)).with_more((X,)).values == (X,)


def test_shapes_tell_structure_shape_and_dtype():
    assert shapes_of(X) == ((3,), "float32") == shapes_of(X + 1)
    assert shapes_of({"a": X}) == shapes_of({"a": X + 1})
    for other in (X[:1], X.astype(jnp.int32), {"a": X}, (X, X)):
        assert shapes_of(X) != shapes_of(other)


def test_bundles_are_pytrees_of_their_values():
    bundle = Bundle(("about",), [X, {"a": X}])
    doubled = jax.tree.map(lambda x: 2 * x, bundle)
    assert doubled.about == ("about",) and len(jax.tree.leaves(bundle)) == 2
    np.testing.assert_array_equal(doubled.values[1]["a"], 2 * X)
    assert jax.tree.structure(bundle) != jax.tree.structure(Bundle(("else",), bundle.values))


def test_labels_by_identity_do_not_keep_objects():
    leaf, other = Leaf(), Leaf()
    label = ById(leaf)
    assert label == ById(leaf) and hash(label) == hash(ById(leaf))
    assert label != ById(other) and label.class_name == "Leaf"
    del leaf
    gc.collect()
    assert label.ref() is None and label != ById(other)


# Recorders.


def test_strangers_are_numbered_by_class():
    recorder = Recorder(INTERMEDIATE)
    root, first, second, other = Leaf(), Leaf(), Leaf(), Other()
    recorder.know(root, ("root",))
    assert recorder.label(root) == ("root",)
    assert recorder.label(first) == Stranger("Leaf", 0) == recorder.label(first)
    assert recorder.label(second) == Stranger("Leaf", 1)
    assert recorder.label(other) == Stranger("Other", 0)
    assert recorder.path_of(root) == ("root",) and recorder.path_of(other) == ("Other",)
    assert recorder.describe(root) == "model.root (Leaf)"
    assert recorder.describe(other) == "Other"


def test_names_are_numbered_where_each_value_has_its_own():
    leaf = Leaf()
    plain, each = Recorder(INTERMEDIATE), Recorder(INTERMEDIATE._replace(each=True))
    assert [plain.meet(leaf, "h") for _ in range(2)] == ["h", "h"]
    assert [each.meet(leaf, name) for name in ("h", "h#1", "h", "h")] == [
        "h",
        "h#1",
        "h#2",
        "h#3",
    ]


def test_records_are_joined_as_they_come():
    recorder, leaf = Recorder(INTERMEDIATE), Leaf()
    for value in (1, 2):
        recorder.add(leaf, nnx.Intermediate, "x", value, append, tuple)
    key = Key(nnx.Intermediate, "x")
    assert recorder.records[Stranger("Leaf", 0)][key].start == (1, 2)
    learning = Recorder(INTERMEDIATE, learning=True)
    learning.add(leaf, nnx.Intermediate, "x", 1, append, tuple)
    assert learning.records == {}


def test_a_recorder_belongs_to_its_level():
    recorder = Recorder(INTERMEDIATE)
    recorder.check_level(lambda: "this")
    with pytest.raises(TraceLevelError, match=r"^this happens under a plain"):
        jax.jit(lambda x: recorder.check_level(lambda: "this"))(X)
    with pytest.raises(TraceLevelError, match=r"^this happens far away"):
        Recorder(INTERMEDIATE, cut_off="far away").check_level(lambda: "this")


def crossed(recorder, nodes, clones, body):
    """Takes a recorder through a transform by hand."""
    given = recorder.inputs([lambda node=node: node for node in nodes])
    with recorder.inside(given, [lambda clone=clone: clone for clone in clones]) as output:
        body()
        outcome = output()
    recorder.deliver(outcome, [lambda node=node: node for node in nodes])
    return given, outcome


def test_records_of_clones_come_out_as_those_of_the_objects():
    recorder, leaf, clone, closed_over = Recorder(INTERMEDIATE), Leaf(), Leaf(), Leaf()
    recorder.know(leaf, ("a",))
    recorder.know(closed_over, ("b",))

    def body():
        for owner in (clone, closed_over, Other()):
            assert owner.sow(nnx.Intermediate, "x", X)

    _, outcome = crossed(recorder, [leaf], [clone], body)
    assert list(recorder.records) == [("a",), ("b",), Stranger("Other", 0)]
    assert [label for label, *_ in outcome.about.entries] == [
        0,
        ById(closed_over),
        Stranger("Other", 0),
    ]
    assert outcome.names() == ["Intermediate 'x'"] * 3


def test_initial_perturbations_reach_clones_closed_over_objects_and_strangers():
    leaf, clone, closed_over = Leaf(), Leaf(), Leaf()
    init = {
        ("a",): {"p": X + 1},
        ("b",): {"p": X + 2},
        Stranger("Other", 0): {"p": X + 3},
        Stranger("Other", 1): {"p": X + 4},
    }
    recorder = Recorder(Wanted((), has_init=True), init)
    recorder.know(leaf, ("a",))
    recorder.know(closed_over, ("b",))
    zero, found = jnp.zeros(3), []

    def body():
        for owner in (clone, closed_over, Other()):
            found.append(owner.perturb("p", zero))

    given, _ = crossed(recorder, [leaf], [clone], body)
    assert [float(x[0]) for x in found] == [1, 2, 3]
    assert given.about.init[-1] == (Stranger("Other", 1), "p")
    found.clear()
    given, _ = crossed(recorder, [leaf], [clone], body)  # counted on from the first call
    assert [float(x[0]) for x in found] == [1, 2, 4]
    assert given.about.init[-1] == (Stranger("Other", 0), "p")


def test_only_perturbations_that_a_body_meets_are_mapped():
    leaf = Leaf()
    recorder = Recorder(Wanted((), has_init=True), {("a",): {"p": X, "q": X}})
    recorder.know(leaf, ("a",))
    given = recorder.inputs([lambda: leaf])
    learner = recorder.learner()
    learner.meet(leaf, "q")
    assert recorder.axes(given, learner, 3).values == [None, 0]
    with pytest.raises(ValueError, match=r"model.a perturbs 'q'.*mapped 5 times.*\(3,\)"):
        recorder.axes(given, learner, 5)


def test_a_recorder_of_another_level_hands_on_nothing():
    leaf = Leaf()
    recorder = Recorder(Wanted((), has_init=True), {("a",): {"p": X}})
    recorder.know(leaf, ("a",))

    def plain(x):
        given = recorder.inputs([lambda: leaf])
        assert given.about.cut_off and given.values == []
        with (
            recorder.inside(given, [lambda: leaf]),
            pytest.raises(TraceLevelError, match=r"perturb\('p'\) in model.a \(Leaf\)"),
        ):
            leaf.perturb("p", x)
        return x

    jax.jit(plain)(X)


def test_object_paths_lists_each_object_once():
    leaf = Leaf()
    root = nnx.Dict(a=leaf, b=[leaf, Other()], n=nnx.Variable(1))
    assert [path for path, _ in object_paths(root)] == [(), ("a",), ("b", 1)]
    assert object_paths(X) == []
