"""A frame: one micro-batch's tensors between the workers of neighbouring stages."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protos import codec, stage_pb2

# Tensors lie in the bytes that came, and nothing writes to them.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")

FORWARD, BACKWARD, EVALUATE = stage_pb2.FORWARD, stage_pb2.BACKWARD, stage_pb2.EVALUATE
_BFLOAT16 = "bfloat16"  # NumPy knows none, so its bits travel as int16


@dataclass(frozen=True, slots=True)
class FrameId:
    """Which frame: whoever waits for one names it.

    Args:
        kind: FORWARD | BACKWARD | EVALUATE.
        phase: train, or the split that is evaluated.
        step: of training.
        micro_batch: its number in the step, or in the split.
    """

    kind: stage_pb2.FrameKind.ValueType
    phase: str
    step: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Frame:
    """A micro-batch's tensors on the host, by name, and those whose gradients are to come back."""

    id: FrameId
    tensors: Mapping[str, Tensor]
    wants_gradient: frozenset[str] = frozenset()

    def parts(self, sender: int) -> tuple[bytes, Sequence[codec.Buffer]]:
        """Its head, from the worker of that rank, and its payload, which lies in the tensors."""
        specs, buffers = codec.pack_arrays(
            (name, _array(tensor)) for name, tensor in self.tensors.items()
        )
        for spec in specs:
            spec.wants_gradient = spec.name in self.wants_gradient
            if self.tensors[spec.name].dtype == torch.bfloat16:
                spec.dtype = _BFLOAT16
        head = stage_pb2.Frame(
            kind=self.id.kind,
            step=self.id.step,
            micro_batch=self.id.micro_batch,
            sender=sender,
            phase=self.id.phase,
            tensors=specs,
        )
        return head.SerializeToString(), buffers

    @staticmethod
    def unpack(head: stage_pb2.Frame, payload: memoryview) -> "Frame":
        """What was packed; its tensors lie in the payload.

        Raises:
            ValueError: no kind of frame that has tensors, or tensors that do not fit the payload.
        """
        if head.kind not in (FORWARD, BACKWARD, EVALUATE):
            raise ValueError(f"kind: expected FORWARD, BACKWARD or EVALUATE, got {head.kind}")
        bits = [spec for spec in head.tensors if spec.dtype == _BFLOAT16]
        for spec in bits:
            spec.dtype = "int16"
        arrays = codec.unpack_arrays(head.tensors, payload)
        tensors = {name: torch.from_numpy(np.asarray(a)) for name, a in arrays.items()}
        for spec in bits:
            tensors[spec.name] = tensors[spec.name].view(torch.bfloat16)
        wanted = frozenset(spec.name for spec in head.tensors if spec.wants_gradient)
        return Frame(FrameId(head.kind, head.phase, head.step, head.micro_batch), tensors, wanted)


def _array(tensor: Tensor) -> NDArray[np.generic]:
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
