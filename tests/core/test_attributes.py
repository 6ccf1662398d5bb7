"""Modes: attributes set on many objects, on the spot or in a view."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, Other, param


def net():
    rngs = nnx.Rngs(0)
    return Net(
        rngs=rngs,
        drop=nnx.Dropout(0.5, rngs=rngs),
        layers=[nnx.Dropout(0.1), nnx.BatchNorm(2, rngs=rngs)],
        mode="a",
    )


def test_train_and_eval_reach_all_modules():
    model = net()
    model.eval()
    assert [model.drop.deterministic, model.layers[0].deterministic] == [True, True]
    assert model.layers[1].use_running_average
    model.train(mode="b")
    assert [model.drop.deterministic, model.layers[1].use_running_average] == [False, False]
    assert model.mode == "b"


def test_objects_that_make_up_attributes_get_none():
    model = net()
    model.eval()
    assert list(vars(model.rngs)) == ["default"]


def test_class_attributes_count_as_there():
    class Layer(Net):
        deterministic = False

    model = Net(layer=Layer())
    model.eval()
    assert model.layer.deterministic
    assert not Layer.deterministic


def test_filters_choose_objects():
    model = Net(a=Net(k=1), b=Other(k=1), k=1)
    nnx.set_attributes(model, Other, nnx.PathContains("a"), k=2)
    assert (model.k, model.a.k, model.b.k) == (1, 2, 2)
    model.set_attributes(Other, k=3)
    assert (model.a.k, model.b.k) == (2, 3)


def test_name_that_no_object_has_is_an_error_and_changes_nothing():
    model = net()
    with pytest.raises(nnx.errors.StructureError, match="has the attribute 'nope', 'nor'"):
        nnx.set_attributes(model, mode="b", nope=1, nor=2)
    with pytest.raises(nnx.errors.StructureError, match="among those the filters choose"):
        nnx.set_attributes(model, Other, mode="b")
    assert model.mode == "a"
    nnx.set_attributes(model, raise_if_not_found=False, nope=1, mode="b")
    assert model.mode == "b"


def test_modes_set_at_another_level_are_errors_and_change_nothing():
    model = net()

    def f(x):
        model.eval()
        return x

    with pytest.raises(nnx.errors.TraceLevelError, match="attribute 'deterministic' of Dropout"):
        jax.jit(f)(1.0)
    assert not model.drop.deterministic


def test_view_shares_variables_and_leaves_the_model_as_it_is():
    model = net()
    quiet = nnx.view(model, deterministic=True, use_running_average=True)
    assert quiet.drop.deterministic
    assert quiet.layers[1].use_running_average
    assert not model.drop.deterministic
    assert quiet.layers[1].scale is model.layers[1].scale
    assert quiet.drop.rngs.key is model.drop.rngs.key
    model.layers[1].scale[...] = jnp.zeros(2)
    assert quiet.layers[1].scale[...].tolist() == [0.0, 0.0]


def test_view_keeps_sharing_cycles_and_methods():
    w = param(1)
    model = Net(a=Net(w=w), b=[w], k=1)
    model.me, model.method = model, model.double
    seen = model.view(k=2)
    assert seen.me is seen
    assert seen.method.__self__ is seen
    assert seen.a.w is seen.b[0] is w
    assert (seen.k, model.k) == (2, 1)


def test_view_with_a_filter_and_without_attributes():
    model = Net(a=Net(k=1), b=Other(k=1))
    assert_isomorphic(nnx.view(model), model)
    seen = nnx.with_attributes(model, only=Other, k=2)
    assert (seen.a.k, seen.b.k) == (1, 2)


class Shouting(Net):
    """Decides itself what a view of it is."""

    def set_view(self, word: str | None = None, times: int = 1) -> None:
        """Sets what is shouted.

        Args:
          word: What to shout,
            in small letters.
          times: How often.
        """
        if word is not None:
            self.word = word.upper() * times


def test_view_asks_the_method_set_view_where_there_is_one():
    model = Net(a=Shouting(word="A", loud=False), b=Net(word="b", loud=False))
    seen = nnx.view(model, word="hey", times=2, loud=True)
    assert (seen.a.word, seen.b.word) == ("HEYHEY", "hey")
    assert seen.a.loud and seen.b.loud
    assert (model.a.word, model.b.word) == ("A", "b")
    plain = nnx.with_attributes(model, word="hey")
    assert plain.a.word == "hey"


def test_set_view_may_take_everything():
    class Greedy(Net):
        def set_view(self, **options):
            self.options = tuple(sorted(options))

    assert nnx.view(Greedy(), anything=1, more=2).options == ("anything", "more")


def test_view_info_tells_what_views_set():
    model = Net(a=Shouting(), b=[Shouting()], c=nnx.Dropout(0.5), d=Net())
    assert nnx.view_info(model, only=Net) == (
        "Shouting:\n"
        "  word: str | None = None\n"
        "    What to shout,\n"
        "    in small letters.\n"
        "  times: int = 1\n"
        "    How often."
    )
    assert nnx.view_info(model).startswith("Dropout:\n  deterministic: bool | None = None\n")
    assert nnx.view_info(Net()) == ""


def test_view_with_an_unknown_name_is_an_error():
    with pytest.raises(nnx.errors.StructureError, match="has the attribute 'nope'"):
        nnx.view(Net(), nope=1)
    assert not hasattr(nnx.view(Net(), raise_if_not_found=False, nope=1), "nope")


def test_view_inside_a_trace_may_be_changed_there():
    model = net()

    def f(x):
        quiet = nnx.view(model, deterministic=True)
        quiet.new = x
        return quiet.drop(x) + quiet.new

    assert jax.jit(f)(jnp.ones(1)).tolist() == [2.0]
    assert not hasattr(model, "new")


def test_new_values_may_be_marked_or_variables():
    model = Net(a=Net(k=1), b=Net(k=2))
    w = param(1)
    nnx.set_attributes(model, k=w)
    assert model.a.k is model.b.k is w
    nnx.set_attributes(model, k=nnx.data(0.5))
    assert nnx.to_pure_dict(nnx.state(model)) == {"a": {"k": 0.5}, "b": {"k": 0.5}}
