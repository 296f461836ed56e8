"""Asynchronous tensor parallelism: in compiled blocks, products run in pieces beside the messages around them.

Torch's own engine: its compiler replaces a gather and the products that use it, and a product and the scatter of its
result, by operations that send a piece while they multiply the one before, through memory that the GPUs of a node
share. Ranks without such memory compute the same graphs plainly: the message, then the product.
"""

import socket
from collections import Counter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.errors import UserError
from meshwright.parallel import async_graph
from meshwright.torch_private.graph_passes import CustomGraphPass, get_hash_for_files, set_last_pass
from meshwright.torch_private.symmetric_memory import fuse_messages, use_plain, use_symmetric_memory

fused_calls: Counter[str] = Counter()
"""Fused operations that this process has computed plainly on a CPU, by torch's name."""


def overlap_products(mesh: DeviceMesh) -> None:
    """Compile from now on with the messages of a mesh's ranks fused into products."""
    group = mesh.get_group()
    if mesh.device_type == "cuda" and "nccl" in dist.get_backend(group):
        _require_shared_memory(group)
        use_symmetric_memory(group)
    else:
        use_plain(group, lambda name: fused_calls.update([name]))
    set_last_pass(FuseMessages())


class FuseMessages(CustomGraphPass):
    """Torch's pass, on graphs that are first put into the form it knows."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        async_graph.use_known_patterns(graph)
        fuse_messages(graph)

    def uuid(self) -> bytes:
        """The pass's version, by which compiled code is cached: its own text."""
        return get_hash_for_files((__file__, async_graph.__file__))


def _require_shared_memory(group: dist.ProcessGroup) -> None:
    """Refuse ranks on several nodes, and GPUs that cannot reach each other's memory."""
    own = torch.cuda.current_device()
    places: list[tuple[str, int]] = [("", 0)] * group.size()
    dist.all_gather_object(places, (socket.gethostname(), own), group=group)
    setting = f"layout.async_tp = true needs GPUs that share memory, and those of layout.tp = {group.size()}"
    if len(hosts := {host for host, _ in places}) > 1:
        most = Counter(host for host, _ in places).most_common()[-1][1]
        raise UserError(
            f"{setting} are on {len(hosts)} nodes; lower layout.tp to {most} or set layout.async_tp = false"
        )
    visible = torch.cuda.device_count()  # a launcher may show each rank its own GPU only: then torch finds out
    for other in {device for _, device in places if device != own and device < visible}:
        if not torch.cuda.can_device_access_peer(own, other):
            raise UserError(f"{setting} do not ({own} and {other} here); set layout.async_tp = false")
