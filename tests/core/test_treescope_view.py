"""The Treescope views: what they hold, what they share with the text, what they never do."""

import html.parser

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import treescope

import nnxlite as nnx
from nnxlite._core.render import text

# Treescope reads all names of NumPy when it first draws, also the deprecated ones.
pytestmark = pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")


class Net(nnx.Module):
    def __init__(self) -> None:
        self.first = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        self.tied = self.first
        self.layers = [nnx.Linear(3, 3, rngs=nnx.Rngs(1))]
        self.heads = {"main head": nnx.Linear(3, 1, rngs=nnx.Rngs(2)), "same": self.layers[0]}
        self.owner = self


def view(value: object) -> str:
    """The view as Treescope writes it in text, with all parts unfolded."""
    with treescope.using_expansion_strategy(max_height=None, target_width=40):
        return treescope.render_to_text(value)


def page(value: object, visualize: bool = True) -> str:
    visualizer = treescope.ArrayAutovisualizer() if visualize else None
    with treescope.active_autovisualizer.set_scoped(visualizer):
        return treescope.render_to_html(value, compressed=False)


def lines_with(part: str, shown: str) -> list[str]:
    return [line.strip() for line in shown.splitlines() if part in line]


def test_headers_count_parameters_as_the_text_does() -> None:
    net = Net()
    assert view(net).splitlines()[0] == text(net).splitlines()[0]
    assert lines_with("heads={", view(net)) == ["heads={  # Param: 16 (64 B)"]


def test_a_shared_part_is_drawn_once_and_both_places_are_named() -> None:
    shown = view(Net())
    assert lines_with("tied=", shown) == ["tied=<Linear shared with .first>,"]
    assert lines_with("'same':", shown) == ["'same': <Linear shared with .layers[0]>,"]
    assert "# also .tied" in shown
    assert "# also .heads['same']" in shown
    assert shown.count("kernel=") == 3


def test_a_cycle_ends() -> None:
    assert lines_with("owner=", view(Net())) == ["owner=<Net cycle to the root>,"]


def test_places_start_at_the_root_of_the_view() -> None:
    shown = view({"model": [Net()]})
    assert "tied=<Linear shared with ['model'][0].first>" in shown
    assert "owner=<Net cycle to ['model'][0]>" in shown


@pytest.mark.parametrize("depth", [1, 3])
def test_the_path_of_a_part_is_code_that_leads_to_it(depth: int) -> None:
    net = Net()
    found = page(net)
    path = [".first.kernel.value", ".heads['main head']", ".layers[0].bias.value"][depth - 1]
    assert f"Copy path: {path}" in found or path in found
    assert eval(f"net{path}") is not None


def test_arrays_are_pictures() -> None:
    net = Net()
    assert page(net).count("arrayviz") > page(net, visualize=False).count("arrayviz")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: nnx.Param(jnp.ones((2, 2)), note="here"), "note='here'"),
        (lambda: nnx.state(Net()), "'main head': {"),
        (lambda: nnx.state(Net(), nnx.Param), "State({  # Param: 25 (100 B)"),
        (lambda: nnx.Rngs(0, dropout=1), "key=RngKey("),
        (lambda: nnx.List([jnp.ones(2), 3]), "List(["),
        (lambda: nnx.Optimizer(Net(), optax.adam(1e-3), wrt=nnx.Param), "mu=State({"),
        (lambda: nnx.Param({"a": [jnp.ones(2)]}), "'a': ["),
        (lambda: nnx.Param(1.0), "Param("),
        (lambda: Net, "Net"),
    ],
)
@pytest.mark.standard_promotion
def test_each_class_has_a_view(make: object, expected: str) -> None:
    value = make()  # type: ignore[operator]
    assert expected in view(value)
    assert page(value)


def test_a_graphdef_shows_the_tree_with_sharing_and_no_arrays() -> None:
    shown = view(nnx.graphdef(Net()))
    assert lines_with("tied=", shown) == ["tied=<Linear shared with .first>,"]
    assert lines_with("owner=", shown) == ["owner=<Net cycle to the root>,"]
    assert lines_with("in_features", shown) == [
        "in_features=2,",
        "in_features=3,",
        "in_features=3,",
    ]
    assert shown.count("kernel=Param()") == 3


def test_a_graphdef_shows_containers_methods_arrays_and_optimizer_states() -> None:
    class Model(nnx.Module):
        def __init__(self) -> None:
            self.pair = nnx.data((nnx.Param(jnp.ones(2), tag="t"), {"empty": {}}))
            self.call = nnx.Linear(2, 2, rngs=nnx.Rngs(0)).__call__
            self.array = jnp.ones(2)
            self.items = nnx.Dict(a=nnx.List([1]))
            self.tree = jax.tree_util.Partial(max, jnp.ones(1))

    shown = view(nnx.graphdef(Model()))
    for expected in (
        "Param(tag='t')",
        "{'empty': {}}",
        "self=Linear(",
        "array=Array()",
        "List([1])",
    ):
        assert expected in shown
    assert "Partial({" in shown


def test_a_graphdef_of_an_optimizer_shows_its_states() -> None:
    optimizer = nnx.Optimizer(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), optax.adam(1e-3))
    shown = view(nnx.graphdef(optimizer))
    assert lines_with("'bias'", shown) == ["'bias': OptVariable(),"] * 2


def test_captured_states_have_a_view() -> None:
    class Model(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "squares", x**2)
            return x

    _, found = nnx.capture(Model(), nnx.Intermediate)(jnp.arange(3.0))
    shown = view(found)
    assert "'squares': Intermediate(" in shown
    assert "[0., 1., 4.]" in shown


@pytest.mark.parametrize(
    "value",
    [
        jnp.zeros((0, 3)),
        jnp.full((3, 3), jnp.nan),
        jnp.ones((2, 2), jnp.bfloat16),
        jnp.ones(3, jnp.int4),
        jnp.ones(3, jnp.complex64),
        jnp.arange(3) > 1,
        jax.random.key(0),
        jax.random.split(jax.random.key(0), 3),
        jax.ShapeDtypeStruct((2,), "float32"),
        np.array(["a"]),
        np.float32(2),
        np.ones((2, 2)),
    ],
    ids=lambda value: str(getattr(value, "dtype", value)),
)
def test_any_array_has_a_view(value: object) -> None:
    layer = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    layer.extra = nnx.Variable(value)
    assert "extra=" in view(layer)
    assert "extra=" in page(layer)


def test_deleted_and_traced_arrays_have_a_view() -> None:
    gone = nnx.Param(jnp.ones(3))
    gone[...].delete()
    assert "deleted float32[3]" in view(gone)
    shown = []
    jax.jit(lambda x: shown.append(view(nnx.Param(x))) or x)(jnp.ones(3))
    assert "traced float32[3]" in shown[0]


def test_objects_that_fail_to_show_do_not_break_the_view() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    class Undrawn:
        def __treescope_repr__(self, path: object, subtree_renderer: object) -> object:
            raise RuntimeError("no picture")

    net = Net()
    net.broken, net.undrawn = Broken(), Undrawn()
    shown = view(net)
    assert "<Broken whose repr failed: RuntimeError>" in shown
    assert "<Undrawn that cannot be drawn: RuntimeError>" in shown


def test_a_class_may_draw_itself() -> None:
    class Own(nnx.Module):
        def __treescope_repr__(self, path: str | None, subtree_renderer: object) -> object:
            return treescope.rendering_parts.text(f"drawn at {path}")

    net = Net()
    net.own = Own()
    assert lines_with("own=", view(net))[-1] == "own=drawn at .own,"


def test_many_children_and_deep_nesting_are_cut() -> None:
    many = nnx.List([nnx.Param(float(n)) for n in range(300)])
    assert "...  # 44 more" in view(many)
    root = node = nnx.Dict()
    for _ in range(100):
        node["below"] = nnx.Dict()
        node = node["below"]
    node["end"] = nnx.Param(1.0)
    assert "Param: 1 (4 B)" in view(root)
    assert page(root)


EVIL = "\"'><script>alert(1)</script><img src=x onerror=alert(1)>"


class Markup(html.parser.HTMLParser):
    """What a browser would run, and what it would only show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.code: list[str] = []
        self.shown: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.code += [str(value) for name, value in attrs if name.startswith("on")]

    def handle_data(self, data: str) -> None:
        (self.code if self.cdata_elem == "script" else self.shown).append(data)


def evil_objects() -> dict[str, object]:
    def named(name: str) -> object:
        net = Net()
        setattr(net, name, nnx.Param(1.0))
        return net

    def holding(value: object) -> object:
        net = Net()
        net.extra = value
        return net

    class Printed:
        def __repr__(self) -> str:
            return EVIL

    error = type(EVIL, (Exception,), {})

    class Raising:
        def __repr__(self) -> str:
            raise error

    function = lambda: None  # noqa: E731
    function.__qualname__ = function.__name__ = EVIL
    return {
        "string": holding(EVIL),
        "attribute": named(EVIL),
        "key": holding({EVIL: nnx.Param(1.0)}),
        "nested key": holding({EVIL: {"a": nnx.Param(jnp.ones((3, 3)))}}),
        "metadata": nnx.Param(1.0, note=EVIL),
        "metadata name": nnx.Param(1.0, **{EVIL: 1}),
        "class": type(EVIL, (nnx.Module,), {})(),
        "repr": holding(Printed()),
        "error": holding(Raising()),
        "function": holding(function),
        "shared key": holding({"a": (net := Net()), EVIL: net, "b": net}),
        "state": nnx.State({EVIL: nnx.Param(1.0)}),
        "graphdef": nnx.graphdef(holding({EVIL: nnx.Param(1.0)})),
    }


@pytest.mark.parametrize("name", evil_objects())
def test_strings_of_the_user_are_escaped(name: str) -> None:
    markup = Markup(page(evil_objects()[name]))
    assert "img" not in markup.tags
    assert not [code for code in markup.code if "alert" in code]
    assert "alert(1)" in "".join(markup.shown)
