"""Results of vjp and jvp: outputs that are differentiated, and what comes beside them."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.changes import CHANGES, do_much
from tests.transforms.samples import Cell, Tree

ONE = jnp.float32(1)


def through_vjp(f, *args, has_aux=False):
    result = nnx.vjp(f, *args, has_aux=has_aux, argnums=())
    return result[::2] if has_aux else result[0]


def through_jvp(f, *args, has_aux=False):
    result = nnx.jvp(f, args, (None,) * len(args), has_aux=has_aux)
    return result[::2] if has_aux else result[0]


BOTH = pytest.mark.parametrize("call", [through_vjp, through_jvp])


@BOTH
@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda c: c, r"output is an object \(Cell\)"),
        (lambda c: {"a": [ONE, c]}, r"output\['a'\]\[1\] is an object \(Cell\)"),
        (lambda c: (ONE, c.w), r"output\[1\] is an object \(Param\)"),
        (lambda c: Cell(), r"output is an object \(Cell\)"),
    ],
)
def test_object_in_the_output_is_an_error_that_says_what_to_do(call, result, found):
    cell = Cell()
    with pytest.raises(TypeError, match=rf"nnx\.\w+\(<lambda>\): {found}.*nnx\.state.*aux"):
        call(lambda c: (c(ONE), result(c))[1], cell)
    assert_isomorphic(Cell(), cell)


@BOTH
def test_output_that_is_no_array_is_an_error_with_its_path(call):
    with pytest.raises(TypeError, match=r"output\['b'\]\['w'\]\.value is no array but str.*aux"):
        call(lambda c: {"a": ONE, "b": nnx.State({"w": nnx.Param("text")})}, Cell())


@BOTH
@pytest.mark.parametrize("result", [ONE, (ONE, ONE, ONE), None])
def test_aux_that_is_missing_is_an_error(call, result):
    with pytest.raises(TypeError, match=r"with has_aux=True expected.*\(output, aux\), found"):
        call(lambda c: result, Cell(), has_aux=True)


@BOTH
def test_output_may_be_any_tree_of_arrays_and_states(call):
    def f(t):
        return {"state": nnx.state(t.left), "none": None, "pair": (t.array, [2.0, 3])}

    tree = Tree()
    output, expected = call(f, tree), f(tree)
    assert jax.tree.structure(output) == jax.tree.structure(expected)
    assert isinstance(output["state"], nnx.State) and type(output["state"]["w"]) is nnx.Param
    for found, wanted in zip(jax.tree.leaves(output), jax.tree.leaves(expected), strict=True):
        assert found == wanted


@BOTH
def test_state_of_the_output_is_the_callers_to_write(call):
    output = call(nnx.state, Cell())
    output["w"][...] = jnp.float32(7)
    assert output["w"][...] == 7


@BOTH
def test_objects_in_aux_are_the_callers(call):
    cell, state = Cell(), nnx.State({"a": nnx.Param(ONE)})
    f = lambda c, s: (c(ONE), [c, c.w, s, "text", None, Cell(5.0)])  # noqa: E731
    output, aux = call(f, cell, state, has_aux=True)
    assert output == 2 and aux[0] is cell and aux[1] is cell.w and aux[2] is state
    assert aux[3:5] == ["text", None] and aux[5].w[...] == 5
    aux[5].w[...] = ONE  # made at the level of the caller


@BOTH
@pytest.mark.parametrize("change", CHANGES[::4], ids=lambda change: change.__name__)
def test_what_the_function_changes_is_changed_on_the_callers_object(call, change):
    eager, lifted = Tree(), Tree()
    change(eager)
    call(lambda t: (change(t), ONE)[1], lifted)
    assert_isomorphic(eager, lifted)


@BOTH
def test_failed_call_changes_nothing(call):
    def fails(t):
        do_much(t)
        return t.left

    tree = Tree()
    with pytest.raises(TypeError, match="output is an object"):
        call(fails, tree)
    assert_isomorphic(Tree(), tree)


@BOTH
def test_write_at_another_level_is_an_error_with_the_path(call):
    cell = Cell()
    with pytest.raises(TraceLevelError, match=r"nnx\.\w+\(<lambda>\) changed c\.n \(Variable\)"):
        jax.vmap(lambda x: call(lambda c, x: c(x), cell, x))(jnp.ones(2))
    with pytest.raises(TraceLevelError, match=r"nnx\.\w+\(<lambda>\) closes over cell\.n"):
        call(lambda x: cell(x), ONE)
    assert int(cell.n[...]) == 0


@pytest.mark.parametrize("name", ["pull", "push"])
def test_capture_of_method_outputs_sees_what_the_method_returns(name):
    class Own(Cell):
        @nnx.vjp
        def pull(self, x):
            return {"y": self(x)}

        @nnx.jvp
        def push(self, x):
            return {"y": self(x)}

    args = (ONE,) if name == "pull" else ((ONE,), (ONE,))
    run = nnx.capture(lambda c: getattr(c, name)(*args)[0], method_outputs=nnx.Intermediate)
    output, state = run(Own())
    assert output == {"y": 2} and state["__call__"][...] == (2,)
    assert state[name].get_value() == ({"y": 2},)
