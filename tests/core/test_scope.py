import abc
import dataclasses
import functools
import gc
import inspect
import pickle
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite import disable_named_call, enable_named_call, named_call, nowrap, override_named_call
from nnxlite._core import context, scope
from nnxlite._core.scope import enter_transform


class Linear(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((4, 4)))

    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]


class Block(nnx.Module):
    def __init__(self) -> None:
        self.up = Linear()

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.tanh(self.up(x))


class Net(nnx.Module):
    def __init__(self) -> None:
        self.blocks = [Block(), Block()]
        self.head = Linear()

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def encode(self, x: jax.Array) -> jax.Array:
        return self.blocks[0](x)


X = jnp.ones((2, 4))


def lowered_names(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names of all operations that `function` stages, before XLA optimises."""
    text = jax.jit(lambda *args: function(*args)).lower(*args).as_text(debug_info=True)
    names = re.findall(r'loc\("jit\(<lambda>\)/([^"]*)"', text)
    return {name.rpartition("/")[0] for name in names} - {""}


def compiled_names(function: Callable[..., Any], *args: Any) -> set[str]:
    """The names in optimised HLO, without the operation at their end."""
    text = jax.jit(lambda *args: function(*args)).lower(*args).compile().as_text()
    names = re.findall(r'op_name="jit\(<lambda>\)/([^"]*)"', text)
    return {name.rpartition("/")[0] for name in names} - {""}


def loss(net: Net) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jnp.sum(net(x))


# Which operations are named how, in lowered and compiled code.


@pytest.mark.parametrize("names_in", [lowered_names, compiled_names])
def test_each_operation_has_the_path_of_its_module(names_in: Any) -> None:
    assert names_in(Net(), X) == {
        "Net/blocks[0]/up",
        "Net/blocks[0]",
        "Net/blocks[1]/up",
        "Net/blocks[1]",
        "Net/head",
    }


@pytest.mark.parametrize("names_in", [lowered_names, compiled_names])
def test_backward_operations_are_named(names_in: Any) -> None:
    names = names_in(jax.grad(loss(Net())), X)
    assert {"jvp(Net)/blocks[0]/up", "jvp(Net)/blocks[1]/up"} <= names
    assert {"transpose(jvp(Net))/blocks[0]/up", "transpose(jvp(Net))/head"} <= names


def through_vmap(net: Net) -> Callable[[jax.Array], jax.Array]:
    return jax.vmap(net)


def through_scan(net: Net) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.scan(lambda carry, _: (net(carry), None), x, length=3)[0]


def through_checkpoint(net: Net) -> Callable[[jax.Array], jax.Array]:
    return jax.checkpoint(lambda x: net(x))


def through_cond(net: Net) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.lax.cond(x[0, 0] > 0, net, lambda x: x, x)


def through_jit(net: Net) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: net(x))


THROUGH = [through_jit, through_vmap, through_scan, through_checkpoint, through_cond]


def modules_in(names: set[str]) -> set[str]:
    """The part of each name that starts at the root module, with the marks of transforms gone."""
    found = set()
    for name in names:
        plain = re.sub(r"(transpose|jvp|vmap|jit)\(|\)", "", name)
        if "Net" in plain:
            found.add("Net" + plain.rpartition("Net")[2])
    return found


@pytest.mark.parametrize("through", THROUGH)
def test_names_pass_through_jax_transforms_forward(through: Any) -> None:
    modules = modules_in(compiled_names(through(Net()), X))
    assert {"Net/blocks[0]/up", "Net/blocks[1]/up", "Net/head"} <= modules


@pytest.mark.parametrize("through", THROUGH)
def test_names_pass_through_jax_transforms_backward(through: Any) -> None:
    function = through(Net())
    names = compiled_names(jax.grad(lambda x: jnp.sum(function(x))), X)
    backward = modules_in({name for name in names if "transpose(" in name})
    assert {"Net/blocks[0]/up", "Net/blocks[1]/up", "Net/head"} <= backward


def test_recomputed_operations_are_named() -> None:
    net = Net()
    names = lowered_names(jax.grad(lambda x: jnp.sum(through_checkpoint(net)(jnp.sin(x)))), X)
    assert any(
        name.endswith("checkpoint/rematted_computation/Net/blocks[0]/up") for name in names
    ), names


def test_gradient_inside_a_mapped_function_is_named() -> None:
    modules = modules_in(compiled_names(jax.vmap(jax.grad(loss(Net()))), X))
    assert {"Net/blocks[0]/up", "Net/head"} <= modules


# Which name a call gets.


def test_method_follows_the_name_of_its_object() -> None:
    assert lowered_names(Net().encode, X) == {"Net.encode/blocks[0]/up", "Net.encode/blocks[0]"}


def test_method_of_the_running_object_stands_alone() -> None:
    class Two(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.encode(x)

    assert lowered_names(Two(), X) == {"Two/encode/blocks[0]/up", "Two/encode/blocks[0]"}


def test_call_of_the_running_object_adds_nothing() -> None:
    class Two(Net):
        def encode(self, x: jax.Array) -> jax.Array:
            return self(x)

    assert "Two.encode/head" in lowered_names(Two().encode, X)


def test_super_does_not_repeat_the_name() -> None:
    class Child(Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x)

    assert lowered_names(Child(), X) == {"Child"}


def test_recursion_does_not_repeat_the_name() -> None:
    class Power(nnx.Module):
        def power(self, x: jax.Array, n: int) -> jax.Array:
            return x if n == 0 else x * self.power(x, n - 1)

    assert lowered_names(lambda x: Power().power(x, 3), X) == {"Power.power"}


def test_skipped_levels_are_joined() -> None:
    class Skip(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.blocks[1].up(x)

    assert lowered_names(Skip(), X) == {"Skip/blocks[1]/up"}


def test_stranger_is_named_by_its_class() -> None:
    linear = Linear()

    class Outer(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return linear(x)

    assert lowered_names(Outer(), X) == {"Outer/Linear"}


def test_shared_object_is_named_from_where_it_is_called() -> None:
    class Tied(nnx.Module):
        def __init__(self) -> None:
            self.first = Block()
            self.proj = self.first.up

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.proj(self.first(x))

    assert lowered_names(Tied(), X) == {"Tied/first/up", "Tied/first", "Tied/proj"}


def test_layer_added_during_the_trace_is_named() -> None:
    class Lazy(nnx.Module):
        def __init__(self) -> None:
            self.layers = [Linear()]

        def __call__(self, x: jax.Array) -> jax.Array:
            x = self.layers[0](x)
            self.layers.append(Linear())
            return self.layers[1](x)

    assert {"Lazy/layers[0]", "Lazy/layers[1]"} <= lowered_names(lambda x: Lazy()(x), X)


def test_calls_outside_of_traces_name_the_traces_within() -> None:
    class Loop(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.repeat(x)

        def repeat(self, x: jax.Array) -> jax.Array:
            names.update(lowered_names(self.head, x))
            return x

    names: set[str] = set()
    Loop()(X)
    assert names == {"Loop/repeat/head"}


def test_own_name_of_a_class() -> None:
    class Attention(Linear):
        scope_name = "attn"

    class Outer(Net):
        def __init__(self) -> None:
            self.blocks = [Attention()]

    assert lowered_names(Outer().encode, X) == {"Outer.encode/attn"}


def test_attribute_named_like_a_part_of_hlo_is_marked() -> None:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.body = Linear()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.body(x)

    assert lowered_names(Outer(), X) == {"Outer/body~"}


# Which methods are wrapped.


def is_wrapped(function: Any) -> bool:
    return function.__code__ == scope._SCOPED_CODE


def test_public_methods_are_wrapped_and_no_others() -> None:
    class Methods(nnx.Module):
        def __init__(self) -> None: ...
        def __post_init__(self) -> None: ...
        def __call__(self) -> None: ...
        def public(self) -> None: ...
        def _private(self) -> None: ...
        def __len__(self) -> int:
            return 0

        def generator(self) -> Iterator[int]:
            yield 0

        async def coroutine(self) -> None: ...

        async def stream(self) -> Any:
            yield 0

        short = lambda self: None  # noqa: E731

    functions = {name: f for name, f in vars(Methods).items() if inspect.isfunction(f)}
    wrapped = {name for name, function in functions.items() if is_wrapped(function)}
    assert wrapped == {"__call__", "public", "short"}


def test_what_is_no_plain_function_is_left_alone() -> None:
    def function(self: Any) -> None: ...

    attributes = {
        "prop": property(function),
        "static": staticmethod(function),
        "klass": classmethod(function),
        "cached": functools.lru_cache(function),
        "compiled": jax.jit(function),
        "once": functools.cached_property(function),
        "builtin": len,
        "partial": functools.partial(function),
        "inner": Linear,
    }
    kind = type("Kind", (nnx.Module,), dict(attributes))
    assert {name: vars(kind)[name] for name in attributes} == attributes


def test_default_of_a_field_is_the_users_function() -> None:
    def double(x: float) -> float:
        return 2 * x

    @dataclasses.dataclass
    class Layer(nnx.Module):
        activation: Callable[[float], float] = double

    class Child(Layer):
        activation = double

    assert Layer.activation is double
    assert Layer().activation is double
    assert vars(Child)["activation"] is double


def test_partial_method_is_named_by_its_function() -> None:
    class Scale(nnx.Module):
        def scale(self, x: jax.Array, by: float) -> jax.Array:
            return x * by

        half = functools.partialmethod(scale, by=0.5)

    assert lowered_names(Scale().half, X) == {"Scale.scale"}


def test_alias_has_a_name_of_its_own() -> None:
    class Alias(Linear):
        def first(self, x: jax.Array) -> jax.Array:
            return x + 1

        second = first

    assert lowered_names(Alias().second, X) == {"Alias.second"}


def test_wrapping_twice_does_nothing() -> None:
    before = dict(vars(Net))
    scope.wrap_methods(Net)
    assert dict(vars(Net)) == before


def test_wrapper_of_a_user_around_a_wrapped_method_is_wrapped() -> None:
    class Child(Linear):
        @functools.wraps(Linear.__call__)
        def __call__(self, x: jax.Array) -> jax.Array:
            return x + 1

    assert lowered_names(Child(), X) == {"Child"}


class Mixin:
    def shift(self, x: jax.Array) -> jax.Array:
        return x + 1

    def _hidden(self) -> None: ...


class Mixed(Mixin, Linear):
    pass


def test_methods_of_a_mixin_are_named() -> None:
    assert lowered_names(Mixed().shift, X) == {"Mixed.shift"}
    assert not is_wrapped(Mixin.shift)
    assert "_hidden" not in vars(Mixed)


def test_mixin_that_comes_later_still_overrides() -> None:
    class Later(Mixin):
        def shift(self, x: jax.Array) -> jax.Array:
            return super().shift(x) * 2

    class Both(Mixed, Later):
        pass

    assert float(Both().shift(jnp.ones(()))) == 4.0
    assert lowered_names(Both().shift, X) == {"Both.shift"}


def test_abstract_method_of_a_mixin_stays_to_be_overridden() -> None:
    class Abstract(abc.ABC):
        @abc.abstractmethod
        def shift(self, x: jax.Array) -> jax.Array: ...

    class Shifts(Abstract):
        def shift(self, x: jax.Array) -> jax.Array:
            return x + 1

    class Base(nnx.Module, Abstract):
        pass

    class Full(Base, Shifts):
        pass

    assert lowered_names(Full().shift, X) == {"Full.shift"}
    with pytest.raises(TypeError, match="abstract"):
        Base()


def test_labelled_method_of_a_mixin_keeps_its_label() -> None:
    class Labelled:
        @named_call(name="label")
        def shift(self, x: jax.Array) -> jax.Array:
            return x + 1

    class Both(Labelled, Linear):
        pass

    assert lowered_names(Both().shift, X) == {"label"}


def test_override_reaches_a_mixin_with_super() -> None:
    class Child(Mixed):
        def shift(self, x: jax.Array) -> jax.Array:
            return super().shift(x) * 2

    assert lowered_names(Child().shift, X) == {"Child.shift"}


def test_signature_and_text_are_kept() -> None:
    class Documented(nnx.Module):
        def make(self, width: int, *, depth: int = 2) -> int:
            """Makes it."""
            return width * depth

    assert str(inspect.signature(Documented.make)) == "(self, width: int, *, depth: int = 2) -> int"
    assert str(inspect.signature(Documented().make)) == "(width: int, *, depth: int = 2) -> int"
    assert (Documented.make.__name__, Documented.make.__doc__) == ("make", "Makes it.")
    assert Documented().make(3) == 6


def test_function_called_through_its_class_needs_no_receiver() -> None:
    class Functions(nnx.Module):
        def three() -> int:
            return 3

        def shift(x: jax.Array) -> jax.Array:
            return x + 1

    assert Functions.three() == 3
    assert lowered_names(Functions.shift, X) == {"shift"}


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_methods_are_pickled(module: Any) -> None:
    for method in (Linear.__call__, Mixed.shift, Mixed.__call__):
        assert module.loads(module.dumps(method)) is method
    bound = module.loads(module.dumps(Mixed().shift))
    assert lowered_names(bound, X) == {"Mixed.shift"}


def test_class_pickled_by_value_is_named() -> None:
    def make() -> type:
        class Local(nnx.Module):
            def __call__(self, x: jax.Array) -> jax.Array:
                return x + 1

        return Local

    copied = pickle.loads(cloudpickle.dumps(make()))
    assert lowered_names(copied(), X) == {"Local"}


# nowrap and named_call.


def test_nowrap_keeps_a_method_out() -> None:
    class Helped(nnx.Module):
        @nowrap
        def help(self, x: jax.Array) -> jax.Array:
            return x + 1

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.help(x)

    assert lowered_names(Helped(), X) == {"Helped"}


def test_nowrap_keeps_a_class_out() -> None:
    @nowrap
    class Quiet(Linear):
        def __call__(self, x: jax.Array) -> jax.Array:
            return super().__call__(x)

        def shift(self, x: jax.Array) -> jax.Array:
            return x + 1

    class Outer(Net):
        def __init__(self) -> None:
            self.blocks = [Quiet()]

        def encode(self, x: jax.Array) -> jax.Array:
            return self.blocks[0].shift(x)

    assert lowered_names(Outer().encode, X) == {"Outer.encode"}


def test_nowrap_of_what_is_no_function_is_an_error() -> None:
    with pytest.raises(TypeError, match="nowrap got a property, not a function or a class"):
        nowrap(property(len))


def test_named_call_labels_a_function() -> None:
    def shift(x: jax.Array) -> jax.Array:
        return x + 1

    assert lowered_names(named_call(shift), X) == {"shift"}
    assert lowered_names(named_call(shift, name="my/while"), X) == {"my/while~"}
    assert lowered_names(named_call(functools.partial(shift)), X) == {"shift"}
    assert lowered_names(named_call(Linear()), X) == {"Linear/Linear"}


def test_named_call_does_not_hold_the_attributes_of_a_module() -> None:
    assert "kernel" not in vars(named_call(Linear()))


def test_named_call_follows_the_switch_only_when_told() -> None:
    def shift(x: jax.Array) -> jax.Array:
        return x + 1

    with override_named_call(False):
        assert lowered_names(named_call(shift), X) == {"shift"}
        assert lowered_names(named_call(shift, force=False), X) == set()


def test_named_call_labels_a_method() -> None:
    class Labelled(Net):
        @named_call(name="first")
        def encode(self, x: jax.Array) -> jax.Array:
            return self.blocks[0].up(x)

        @named_call
        def _private(self, x: jax.Array) -> jax.Array:
            return x + 1

        def __call__(self, x: jax.Array) -> jax.Array:
            return self._private(self.encode(x))

    assert lowered_names(Labelled(), X) == {"Labelled/first/blocks[0]/up", "Labelled/_private"}


def test_named_call_of_a_generator_is_an_error() -> None:
    def steps() -> Iterator[int]:
        yield 0

    with pytest.raises(TypeError, match="named_call got 'steps', a generator"):
        named_call(steps)


# Switches.


def compiled_text(function: Callable[..., Any]) -> str:
    return jax.jit(lambda x: function(x)).lower(X).compile().as_text()


def without_metadata(text: str) -> str:
    text = re.sub(r", metadata=\{[^}]*\}", "", text)
    return re.sub(r"\nFileNames.*?(?=\n\n[%E])", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("through", THROUGH)
def test_compiled_code_is_the_same_with_and_without_names(through: Any) -> None:
    function = through(Net())
    gradient = jax.grad(lambda x: jnp.sum(function(x)))
    on = compiled_text(gradient)
    with override_named_call(False):
        off = compiled_text(gradient)
    assert ("blocks[0]" in on, "blocks[0]" in off) == (True, False)
    assert without_metadata(on) == without_metadata(off)


def test_switched_off_nothing_is_named() -> None:
    with override_named_call(False):
        assert lowered_names(Net(), X) == set()


def test_toggle_reaches_a_cached_plain_jit() -> None:
    net = Net()
    jitted = jax.jit(lambda x: net(x))

    def named() -> bool:
        return "blocks[0]" in jitted.lower(X).compile().as_text()

    try:
        seen = [named()]
        disable_named_call()
        seen.append(named())
        with override_named_call(True):
            seen.append(named())
        enable_named_call()
        seen.append(named())
    finally:
        context.set_process_default(context.START)
    assert seen == [True, False, True, True]


def test_jaxpr_has_no_trace_of_names() -> None:
    linear = Linear()
    with_names = jax.make_jaxpr(lambda x: linear(x))(X)
    assert str(with_names) == str(jax.make_jaxpr(lambda x: x @ linear.kernel[...])(X))


# What stays behind.


def test_nothing_is_pushed_outside_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed = []
    monkeypatch.setattr(jax, "named_scope", pushed.append)
    Net()(X)
    assert pushed == []


def test_nothing_is_kept_after_a_trace() -> None:
    models = [Net(), Linear()]
    gone = [weakref.ref(models[0]), weakref.ref(models[0].head), weakref.ref(models[1])]
    lowered_names(lambda x: models[1](models[0](x)), X)
    models.clear()
    jax.clear_caches()
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_exception_ends_all_calls() -> None:
    class Fails(Net):
        def encode(self, x: jax.Array) -> jax.Array:
            raise KeyError("inside")

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.encode(x)

    for function in (Fails(), jax.jit(Fails().encode)):
        with pytest.raises(KeyError, match="inside"):
            function(X)
        assert scope.RUNNING.frame is None
    assert "Net" in "".join(lowered_names(Net(), X))


def test_calls_of_other_threads_are_not_seen() -> None:
    names: list[set[str]] = []

    class Threads(Net):
        def __call__(self, x: jax.Array) -> jax.Array:
            thread = threading.Thread(target=lambda: names.append(lowered_names(self.head, X)))
            thread.start()
            thread.join()
            return x

    lowered_names(Threads(), X)
    assert names == [{"Linear"}]


# Transforms that keep traced functions.


class Wide(nnx.Module):
    def __init__(self, apply: Callable[..., Any]) -> None:
        self.layers = [Linear(), Linear()]
        self.apply = apply

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = self.apply(layer, x)
        return x


def kept_names(function: Callable[..., Any]) -> set[str]:
    """The names of what runs inside of a jit inside, without those of jits."""
    names = {name for name in compiled_names(function, X) if "jit(" in name}
    return {re.sub(r"/?jit\([^)]*\)", "", name) for name in names}


def text_at_top(jitted: Any, *args: Any) -> str:
    return jitted.lower(*args).as_text(debug_info=True)


def test_layers_through_one_jit_have_their_own_names() -> None:
    @nnx.jit
    def apply(linear: Linear, x: jax.Array) -> jax.Array:
        traces.append(linear)
        return jnp.tanh(linear(x))

    traces: list[Linear] = []
    assert kept_names(Wide(apply)) == {"Wide/layers[0]", "Wide/layers[1]"}
    assert len(traces) == 1


def test_jit_at_top_level_names_the_class() -> None:
    jitted = nnx.jit(lambda linear, x: linear(x))
    assert "/Linear/dot_general" in text_at_top(jitted, Linear(), X)


def test_gradient_inside_a_jit_is_named() -> None:
    gradient = nnx.grad(lambda net, x: jnp.sum(net(x)))
    text = nnx.jit(lambda net, x: gradient(net, x)).lower(Net(), X).compile().as_text()
    names = {name for name in re.findall(r'op_name="([^"]*)/\w+"', text) if "jvp" in name}
    assert modules_in(names) >= {"Net/blocks[0]/up", "Net/blocks[1]/up", "Net/head"}
    backward = {name for name in names if "transpose(" in name}
    assert modules_in(backward) >= {"Net/blocks[0]/up", "Net/blocks[1]/up", "Net/head"}


class Fast(Linear):
    @nnx.jit
    def shift(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    @nnx.jit
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.kernel[...]

    def both(self, x: jax.Array) -> jax.Array:
        return self.shift(x)


def test_jitted_method_is_named_at_top_level() -> None:
    assert "/Fast.shift/sin" in text_at_top(Fast.shift, Fast(), X)
    assert "/Fast/dot_general" in text_at_top(Fast.__call__, Fast(), X)


def test_jitted_method_is_named_inside_a_trace() -> None:
    fast = Fast()
    assert kept_names(lambda x: fast(fast.shift(x))) == {"Fast.shift", "Fast"}


def test_jitted_method_of_the_running_object_stands_alone() -> None:
    assert kept_names(Fast().both) == {"Fast.both/shift"}


def test_jitted_method_of_a_mixin_is_left_alone() -> None:
    class Jitted:
        @nnx.jit
        def shift(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x)

    class Both(Jitted, Linear):
        pass

    assert "shift" not in vars(Both)
    assert kept_names(Both().shift) == {"Both.shift"}


def test_other_method_inside_a_jit_is_named() -> None:
    class Two(Linear):
        def shift(self, x: jax.Array) -> jax.Array:
            return jnp.sin(x)

    two = Two()
    apply = nnx.jit(lambda two, x: two.shift(x))
    assert kept_names(lambda x: apply(two, x)) == {"Two/shift"}


@pytest.mark.parametrize("receiver", [None, Linear()])
def test_at_top_level_nothing_is_nested(receiver: Any) -> None:
    with enter_transform(receiver) as nested:
        assert not nested


def test_inside_a_trace_the_call_is_nested() -> None:
    def function(x: jax.Array) -> jax.Array:
        with enter_transform(Linear()) as nested, enter_transform(None) as without:
            seen.append((nested, without))
        with override_named_call(False), enter_transform(Linear()) as off:
            seen.append(off)
        return x

    seen: list[Any] = []
    jax.jit(function)(X)
    assert seen == [(True, False), False]


def test_toggle_reaches_a_cached_jit() -> None:
    @nnx.jit
    def apply(linear: Linear, x: jax.Array) -> jax.Array:
        traces.append(context.current().scopes)
        return linear(x)

    def toggle() -> bool:
        linear = Linear()
        apply(linear, X)
        disable_named_call()
        apply(linear, X)
        with override_named_call(True):
            apply(linear, X)
        enable_named_call()
        apply(linear, X)
        return True

    traces: list[bool] = []
    try:
        toggle()
    finally:
        context.set_process_default(context.START)
    assert traces == [True, False]


def test_running_calls_are_hidden_from_a_jit() -> None:
    class Outer(Linear):
        def __init__(self) -> None:
            self.inner = inner

        def __call__(self, x: jax.Array) -> jax.Array:
            texts.append(text_at_top(apply, self, x))
            return x

    inner = Linear()
    apply = nnx.jit(lambda outer, x: inner(x))
    texts: list[str] = []
    Outer()(X)
    assert "/Linear/dot_general" in texts[0]
    assert "/inner/" not in texts[0]


def test_functional_use_has_the_same_names() -> None:
    graphdef, state = nnx.split(Net())
    assert lowered_names(lambda x: nnx.merge(graphdef, state)(x), X) == lowered_names(Net(), X)


def test_containers_are_indexed() -> None:
    class Held(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([Linear()])
            self.heads = nnx.Dict(a=Linear())
            self.stack = nnx.Sequential(Linear())

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.stack(self.heads["a"](self.layers[0](x)))

    assert lowered_names(Held(), X) == {
        "Held/layers[0]",
        "Held/heads[a]",
        "Held/stack/layers[0]",
    }


def test_model_as_an_argument_of_plain_jit_has_the_same_names() -> None:
    jitted = jax.jit(lambda net, x: net(x))
    assert "/Net/blocks[1]/up/dot_general" in text_at_top(jitted, Net(), X)
