"""The tensor codec against protobuf itself."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from protos import codec
from protos.stage_pb2 import Frame
from protos.tensor_pb2 import TensorSpec

DTYPES = ["float32", "float64", "int64", "int32", "uint64", "uint8", "bool", "float16"]


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=5
    ),
    st.integers(0, 2**63),
)
def test_arrays_survive_the_wire(shapes, step):
    rng = np.random.default_rng(0)
    arrays = {
        f"t{i}": rng.integers(0, 2, size=shape).astype(dtype)
        for i, (dtype, shape) in enumerate(shapes)
    }
    specs, buffers = codec.pack_arrays(arrays.items())
    data = codec.pack(Frame(step=step, tensors=specs), *buffers)

    head, payload = codec.unpack(Frame, data)
    assert head.step == step
    received = codec.unpack_arrays(head.tensors, payload)
    assert list(received) == list(arrays)
    for name, array in arrays.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)


@given(st.binary(max_size=3000), st.integers(0, 2**64 - 1))
def test_the_bytes_are_ordinary_protobuf(payload, step):
    packed = codec.pack(Frame(step=step, phase="train"), payload)
    assert Frame.FromString(packed) == Frame(step=step, phase="train", payload=payload)
    head, view = codec.unpack(Frame, Frame(step=step, payload=payload).SerializeToString())
    assert (head.step, bytes(view)) == (step, payload)


def test_the_payload_is_not_copied():
    data = codec.pack(Frame(), bytes(1000))
    _, view = codec.unpack(Frame, data)
    assert view.obj is data


@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_but_never_crash(data):
    try:
        head, payload = codec.unpack(Frame, data)
        codec.unpack_arrays(head.tensors, payload)
    except (DecodeError, ValueError, TypeError):
        pass


def test_a_tensor_larger_than_the_payload_is_refused():
    specs = [TensorSpec(name="x", dtype="float32", shape=[4, 4])]
    with pytest.raises(ValueError, match=r"'x' float32.* does not fit in a payload of 8 bytes"):
        codec.unpack_arrays(specs, memoryview(bytes(8)))


def test_a_head_without_end_is_refused_at_its_beginning():
    """Field by field, a large message of nothing but heads would take its reader minutes."""
    field = Frame(step=1).SerializeToString()
    assert codec.unpack(Frame, field * 1000)[0].step == 1
    with pytest.raises(DecodeError, match="before the payload"):
        codec.unpack(Frame, field * (8 << 20))
