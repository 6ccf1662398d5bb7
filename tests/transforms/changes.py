"""Changes of every kind that a function may make to a `Tree`."""

import jax.numpy as jnp

import nnxlite as nnx
from tests.transforms.samples import Cell


def set_value(m):
    m.left.w[...] = m.right.w[...] + m.array


def set_part_of_a_pytree_value(m):
    m.both.value = {"x": m.both.value["x"] + m.array, "y": m.both.value["y"]}


def set_structure_of_a_value(m):
    m.both.value = [m.array, m.array]


def set_shape_and_dtype(m):
    m.left.w.value = jnp.zeros((3,), jnp.int32)


def set_array_attribute(m):
    m.array = m.array + m.left.w[...]


def set_array_in_a_list(m):
    m.items[1] = m.items[1] * m.array


def set_array_in_a_tuple(m):
    m.pair = (m.array, *m.pair[1:])


def set_variable_in_a_tuple(m):
    m.pair[1].value = m.array


def set_variable_in_a_dict(m):
    m.table["b"][...] *= m.array


def add_variable(m):
    m.left.extra = nnx.BatchStat(m.array + m.left.w[...])


def add_array(m):
    m.right.extra = m.array * m.array


def add_object(m):
    m.extra = Cell()
    m.extra.w.value = m.array


def add_static(m):
    m.extra = ("a", 1)


def add_list(m):
    m.extra = [m.left, Cell(), {"deep": nnx.Param(m.array)}]


def append_to_a_list(m):
    m.items.append(nnx.Param(m.array))


def append_a_static(m):
    m.items.append(3)


def shorten_a_list(m):
    del m.items[0]


def reverse_a_list(m):
    m.items.reverse()


def add_to_a_dict(m):
    m.table["c"] = m.right


def remove_from_a_dict(m):
    del m.table["a"]


def remove_attribute(m):
    del m.right


def remove_one_of_two_references(m):
    del m.again


def swap_children(m):
    m.left, m.right = m.right, m.left


def swap_variables(m):
    m.left.w, m.right.w = m.right.w, m.left.w


def share_a_child(m):
    m.right = m.left


def share_a_variable(m):
    m.right.w = m.left.w


def stop_sharing(m):
    m.again = Cell(4.0)


def close_a_cycle(m):
    m.left.root = m
    m.left.me = m.left


def change_a_static(m):
    m.mode = "eval"


def change_the_type_of_a_static(m):
    m.mode = 1
    m.left.mode = 1.0


def replace_a_variable_by_another_kind(m):
    m.left.w = nnx.BatchStat(m.left.w[...])


def replace_a_variable_by_an_array(m):
    m.left.w = m.left.w[...] + m.array


def replace_an_array_by_a_variable(m):
    m.array = nnx.Param(m.array)


def replace_a_child_by_a_static(m):
    m.left = None


def replace_a_list(m):
    m.items = list(m.items)


def change_metadata(m):
    m.left.w.set_metadata("note", ("a", 1))


def change_metadata_and_value(m):
    m.left.w.set_metadata(note=1)
    m.left.w[...] += m.array


def write_and_restore(m):
    old = m.left.w.get_value()
    m.left.w[...] = m.array
    m.left.w.value = old


def call_methods(m):
    m.left(m.array)
    m.items[0](m.array)
    m.again(m.array)


def do_much(m):
    for change in (call_methods, add_list, swap_children, set_array_in_a_tuple, change_a_static):
        change(m)


CHANGES = [
    set_value,
    set_part_of_a_pytree_value,
    set_structure_of_a_value,
    set_shape_and_dtype,
    set_array_attribute,
    set_array_in_a_list,
    set_array_in_a_tuple,
    set_variable_in_a_tuple,
    set_variable_in_a_dict,
    add_variable,
    add_array,
    add_object,
    add_static,
    add_list,
    append_to_a_list,
    append_a_static,
    shorten_a_list,
    reverse_a_list,
    add_to_a_dict,
    remove_from_a_dict,
    remove_attribute,
    remove_one_of_two_references,
    swap_children,
    swap_variables,
    share_a_child,
    share_a_variable,
    stop_sharing,
    close_a_cycle,
    change_a_static,
    change_the_type_of_a_static,
    replace_a_variable_by_another_kind,
    replace_a_variable_by_an_array,
    replace_an_array_by_a_variable,
    replace_a_child_by_a_static,
    replace_a_list,
    change_metadata,
    change_metadata_and_value,
    write_and_restore,
    call_methods,
    do_much,
]
