"""Training state taken apart for the way to another process, and put together there."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")
import torch

from stretto.core.errors import InputError
from stretto.torch.pack import as_bytes, pack, receive_buffers, unpack

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = scalars.filter(lambda key: key == key) | st.tuples(st.integers(), st.text())  # noqa: PLR0124 - no NaN
values = st.recursive(
    scalars | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def carried(value: Any) -> Any:
    """As a newcomer receives it: the header, and the bytes of each tensor."""
    packed = pack(value)
    received = receive_buffers(packed.header, "cpu")
    for there, here in zip(received, packed.tensors, strict=True):
        as_bytes(there).copy_(as_bytes(here))
    return unpack(packed.header, received)


@given(values)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    assert repr(carried(value)) == repr(value), "repr also tells 1 from True and knows nan"


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.complex64,
        torch.int8,
        torch.uint16,
        torch.int64,
        torch.bool,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_tensors_of_any_dtype_and_shape_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(math.prod(shape)).reshape(shape) % 2).to(dtype)
    back = carried({"t": tensor})["t"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert as_bytes(back).tolist() == as_bytes(tensor).tolist()


def test_the_header_is_json_and_tensors_are_not_in_it() -> None:
    packed = pack({"weights": torch.zeros(10_000)})
    json.loads(packed.header)
    assert len(packed.header) < 200


def test_a_shared_tensor_travels_once_and_stays_shared() -> None:
    weight = torch.randn(4, 4)
    packed = pack({"encoder": weight.detach(), "decoder": weight.detach(), "other": weight.t()})
    assert len(packed.tensors) == 2, "the transposed view is another tensor"
    back = unpack(packed.header, packed.tensors)
    assert back["encoder"] is back["decoder"]
    assert torch.equal(back["other"], weight.t())


def test_empty_tensors_are_not_taken_for_one_another() -> None:
    back = carried([torch.zeros(0), torch.zeros(0, 3), torch.zeros(0)])
    assert [tuple(one.shape) for one in back] == [(0,), (0, 3), (0,)]


def test_torch_and_numpy_values_and_kinds_of_dict_come_back() -> None:
    value = {
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda:1"),
        "ordered": OrderedDict(b=1, a=2),
        "counter": Counter({30: 1, 80: 1}),
        "float": np.float64(0.5),
        "int": np.int64(3),
    }
    back = carried(value)
    assert back == value
    assert [type(one) for one in back.values()] == [
        torch.Size,
        torch.dtype,
        torch.device,
        OrderedDict,
        Counter,
        float,
        int,
    ]


def test_state_dicts_of_a_model_an_optimizer_and_a_scheduler_come_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    back = carried({"m": model.state_dict(), "o": optimizer.state_dict(), "s": schedule.state_dict()})
    for key, tensor in model.state_dict().items():
        assert torch.equal(back["m"][key], tensor)
    other = torch.optim.AdamW(model.parameters(), lr=1.0)
    other.load_state_dict(back["o"])
    assert other.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    assert torch.equal(
        other.state_dict()["state"][0]["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"]
    )
    again = torch.optim.lr_scheduler.MultiStepLR(other, [7])
    again.load_state_dict(back["s"])
    assert again.milestones == Counter({1: 1, 2: 1})


class Foo:
    pass


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"optimizer": {"state": {0: {"foo": Foo()}}}}, r"optimizer\.state\.0\.foo is a Foo"),
        ([1, (2, {3})], r"1\.1 is a set"),
        (Foo(), "the state is a Foo"),
        ({"a": {Foo(): 1}}, "a has a key that is a Foo"),
        ({"a": {(1, b"x"): 1}}, "a has a key that is a tuple"),
        ({"a": torch.eye(2).to_sparse()}, "a is a Tensor of layout torch.sparse_coo"),
        ({"a": torch.empty(2, device="meta")}, "has no data"),
        ({"a": np.zeros(2)}, "a is a ndarray"),
    ],
)
def test_what_is_not_data_is_refused_by_its_path(value: Any, said: str) -> None:
    with pytest.raises(InputError, match=said) as raised:
        pack(value)
    assert raised.value.remedy


def test_a_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["self"] = state
    with pytest.raises(InputError, match="contains itself"):
        pack(state)


def test_what_is_of_the_same_kind_at_the_same_place_is_received_into_ones_own_memory() -> None:
    theirs = pack({"step": 7, "things": [OrderedDict(a=torch.ones(2), b=torch.ones(3), c=torch.ones(4)), {}]})
    own = {"a": torch.zeros(2), "b": torch.zeros(3, dtype=torch.float64), "c": torch.zeros(5)}
    a, b, c = receive_buffers(
        theirs.header, "cpu", pack({"things": [OrderedDict(reversed(own.items())), None]})
    )
    assert a.data_ptr() == own["a"].data_ptr()
    assert (b.dtype, c.shape) == (torch.float32, (4,))
    assert {b.data_ptr(), c.data_ptr()}.isdisjoint(one.data_ptr() for one in own.values())
