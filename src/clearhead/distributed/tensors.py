"""DTensors in and out: the parts that lie here, and the output sharded as the queries are."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Size, Tensor
from torch.distributed.tensor import DTensor, Shard

from clearhead.core.errors import ArgumentError
from clearhead.distributed.placement import Placement


class Wraps(NamedTuple):
    """How queries were sharded: over which mesh, how on each of its dimensions, and which of them splits sequences."""

    device_mesh: Any
    placements: tuple[Any, ...]
    dimension: int
    shape: tuple[int, ...]

    def mesh(self, given: Any) -> Any:
        """The dimension of the mesh along which sequences are split, or what was given."""
        if given is not None:
            return given
        names = self.device_mesh.mesh_dim_names
        if self.device_mesh.ndim == 1:
            return self.device_mesh
        if names is None:
            raise ArgumentError("mesh", "is not given, and that of q has several dimensions without names")
        return self.device_mesh[names[self.dimension]]


def local(given: dict[str, Any]) -> Wraps | None:
    """Replace DTensors among q, k and v by the parts that lie here; None where there are none."""
    tensors = {name: given[name] for name in ("q", "k", "v") if isinstance(given[name], DTensor)}
    if not tensors:
        return None
    if len(tensors) != 3:
        raise ArgumentError("q, k, v", "are partly DTensors, expected all of them or none")
    found: dict[str, int] = {}
    for name, tensor in tensors.items():
        along = [
            d
            for d, how in enumerate(tensor.placements)
            if isinstance(how, Shard) and how.dim % tensor.ndim == tensor.ndim - 2
        ]
        if len(along) != 1:
            raise ArgumentError(name, f"has placements {tensor.placements}, expected the sequence axis sharded once")
        found[name] = along[0]
        given[name] = tensor.to_local()
    q = tensors["q"]
    if len(set(found.values())) != 1 or any(t.device_mesh != q.device_mesh for t in tensors.values()):
        raise ArgumentError("q, k, v", "are sharded over different meshes or dimensions, expected the same")
    wraps = Wraps(q.device_mesh, q.placements, found["q"], tuple(q.shape))
    size = q.device_mesh.size(wraps.dimension)
    for name, key in (("placement", "q"), ("key_placement", "k")):
        if given[name] is None:
            given[name] = chunked(tensors[key].shape[-2], size)
    return wraps


def chunked(n: int, world: int) -> Placement:
    """As PyTorch cuts a sharded axis: parts of equal length, the last ones shorter or empty."""
    each = -(-n // world)
    return Placement.of_lengths([max(0, min(each, n - rank * each)) for rank in range(world)])


def wrapped(output: Tensor, wraps: Wraps) -> DTensor:
    """The output as a DTensor, sharded as the queries were."""
    shape = (*wraps.shape[:-1], output.shape[-1])
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= size
    return DTensor.from_local(
        output.contiguous(),
        wraps.device_mesh,
        wraps.placements,
        run_check=False,
        shape=Size(shape),
        stride=tuple(reversed(stride)),
    )
