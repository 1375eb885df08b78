"""``map_tensors`` and ``tensors_in``: everything a block may take or return."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from torchtitan_dmuon.dmuon.nested import map_tensors, tensors_in


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass
class Record:
    x: Any
    note: Any = "note"


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any
    inner: Record


@dataclasses.dataclass(slots=True)
class Slotted:
    x: Any


@dataclasses.dataclass
class Derived:
    """One field is no argument of ``__init__`` and changes after it."""

    x: Any
    calls: int = dataclasses.field(default=0, init=False)
    cached: Any = dataclasses.field(default=None, init=False)


class MyList(list):
    pass


class Opaque:
    def __init__(self, x):
        self.x = x


def t(value):
    return torch.tensor([float(value)])


def double(tensor):
    return tensor * 2


def values(tree):
    return [tensor.item() for tensor in tensors_in(tree)]


CASES = {
    "tensor": lambda: t(1),
    "list": lambda: [t(1), t(2)],
    "tuple": lambda: (t(1), t(2)),
    "one-tuple": lambda: (t(1),),
    "empty": lambda: ([], (), {}),
    "dict": lambda: {"a": t(1), 2: t(2)},
    "ordered": lambda: collections.OrderedDict(b=t(1), a=t(2)),
    "named tuple": lambda: Pair(t(1), t(2)),
    "dataclass": lambda: Record(t(1), [t(2)]),
    "frozen dataclass": lambda: Frozen(t(1), Record(t(2))),
    "slotted dataclass": lambda: Slotted([t(1)]),
    "list subclass": lambda: MyList([t(1), t(2)]),
    "default dict": lambda: collections.defaultdict(list, a=t(1)),
    "nested": lambda: [({"a": Pair(t(1), [t(2)])}, Record({"b": (t(3),)}, Pair(None, t(4)))), t(5)],
}


def same_structure(first, second):
    """Equal types all the way down; returns the pairs of tensors."""
    assert type(first) is type(second)
    if isinstance(first, torch.Tensor):
        return [(first, second)]
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        children = [(getattr(first, name), getattr(second, name)) for name in names]
    elif isinstance(first, dict):
        assert list(first) == list(second)
        children = [(first[key], second[key]) for key in first]
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second)
        children = list(zip(first, second, strict=True))
    else:
        assert first is second or first == second
        return []
    return [pair for child in children for pair in same_structure(*child)]


@pytest.mark.parametrize("case", CASES)
def test_map_reaches_every_tensor_and_keeps_the_structure(case):
    tree = CASES[case]()
    mapped = map_tensors(double, tree)
    pairs = same_structure(tree, mapped)
    assert [before.item() for before, _ in pairs] == [1.0, 2.0, 3.0, 4.0, 5.0][: len(pairs)]
    for before, after in pairs:
        assert after.item() == 2 * before.item()
    assert values(tree) == [before.item() for before, _ in pairs]  # and the argument is as it was


@pytest.mark.parametrize("case", CASES)
def test_tensors_in_finds_every_tensor_once_and_in_order(case):
    found = list(tensors_in(CASES[case]()))
    assert [tensor.item() for tensor in found] == [float(i + 1) for i in range(len(found))]
    assert len(found) == {
        "nested": 5,
        "tensor": 1,
        "one-tuple": 1,
        "slotted dataclass": 1,
        "default dict": 1,
        "empty": 0,
    }.get(case, 2)


def test_model_output():
    output = BaseModelOutputWithPast(last_hidden_state=t(1), hidden_states=(t(2), t(3)))
    mapped = map_tensors(double, output)
    assert type(mapped) is BaseModelOutputWithPast
    assert mapped.last_hidden_state.item() == mapped["last_hidden_state"].item() == mapped[0].item() == 2.0
    assert [tensor.item() for tensor in mapped.hidden_states] == [4.0, 6.0]
    assert mapped.past_key_values is None and mapped.attentions is None
    assert list(mapped.keys()) == ["last_hidden_state", "hidden_states"]
    assert values(output) == [1.0, 2.0, 3.0]
    assert values(mapped) == [2.0, 4.0, 6.0]


def test_model_output_whose_first_field_is_missing():
    mapped = map_tensors(double, CausalLMOutputWithPast(logits=t(1)))
    assert type(mapped) is CausalLMOutputWithPast
    assert mapped.loss is None
    assert mapped.logits.item() == mapped[0].item() == 2.0
    assert values(mapped) == [2.0]


def test_other_objects_pass_through():
    opaque = Opaque(t(1))
    for value in (
        None,
        3,
        2.5,
        "text",
        b"bytes",
        True,
        opaque,
        Record,
        torch.float32,
        torch.device("cpu"),
        {1, 2},
    ):
        assert map_tensors(double, value) is value
        assert list(tensors_in(value)) == []
    assert opaque.x.item() == 1.0
    mapped = map_tensors(double, [None, opaque, "text", t(1)])
    assert mapped[:3] == [None, opaque, "text"] and mapped[3].item() == 2.0


def test_torch_size_passes_through():
    """A tuple subclass that cannot be built like a named tuple; blocks pass shapes around."""
    shape = torch.Size((2, 3))
    mapped = map_tensors(double, {"shape": shape, "x": t(1)})
    assert mapped["shape"] == shape and type(mapped["shape"]) is torch.Size
    assert mapped["x"].item() == 2.0
    assert list(tensors_in(shape)) == []


def test_return_types_of_torch():
    """What ``x.max(dim)`` returns: a tuple with names, built from one iterable."""
    result = torch.tensor([[1.0, 3.0]]).max(dim=1)
    mapped = map_tensors(lambda tensor: tensor * 2, result)
    assert mapped[0].item() == 6.0 and mapped[1].item() == 2
    assert mapped.values.item() == 6.0


def test_fields_that_init_does_not_take_are_kept():
    record = Derived(t(1))
    record.calls, record.cached = 7, t(2)
    mapped = map_tensors(double, record)
    assert mapped.x.item() == 2.0
    assert mapped.calls == 7
    assert mapped.cached.item() == 4.0
    assert values(record) == [1.0, 2.0]


def test_gradients_flow_through():
    x = torch.ones(2, requires_grad=True)
    mapped = map_tensors(double, Record(x, {"y": x}))
    (mapped.x.sum() + mapped.note["y"].sum()).backward()
    assert x.grad.tolist() == [4.0, 4.0]
    assert all(tensor.requires_grad for tensor in tensors_in(mapped))


def test_identity_is_kept_where_nothing_changes():
    x = t(1)
    assert map_tensors(lambda tensor: tensor, [x])[0] is x
