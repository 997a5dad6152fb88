"""The workers of one job: a torch process group that is formed again at every resize."""

from __future__ import annotations

import atexit
import functools
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from stretto.core.errors import InputError
from stretto.torch.foreign import init_process_group, refuse_users_group
from stretto.torch.pack import NOTHING, Packed, as_bytes, receive_buffers

_MEET_S = 120.0
"""How long members wait for each other when a group forms."""
_EXCHANGE_S = 600.0
"""How long a worker waits for its peers' gradients; the controller notices hung workers much earlier."""
_EXIT_S = 10.0
"""How long a script waits at exit for a pending exchange."""


_NOT_ASKED = (-1, -1)


class PeerLostError(Exception):
    """A worker of the group is gone, so the others cannot continue."""


class DivergedError(InputError):
    """Workers of one run hold different models, or are about to. A retry would fail the same way."""


class OrderKind(IntEnum):
    """What a group can agree to do at a step boundary."""

    NOTHING = 0
    REGROUP = 1
    PARK = 2
    BATCH = 3
    FINISH_EPOCH = 4


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """An action that all workers take at the same step boundary."""

    code: OrderKind
    first: int = 0
    """REGROUP: the generation. BATCH: examples per worker and pass."""
    second: int = 0
    """BATCH: passes added before each step."""


ENDS_GROUP = frozenset({OrderKind.REGROUP, OrderKind.PARK})


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Errors of an exchange mean that a worker does not take part: PeerLostError."""
    try:
        yield
    except RuntimeError as error:
        raise PeerLostError(str(error)) from error


@_peer_errors()
def wait_for(work: Any) -> None:
    """Wait for an exchange."""
    work.wait()


class Rendezvous:
    """A key-value store in this process, where the groups form in which it is rank 0."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._addresses = 0

    @functools.cached_property
    def store(self) -> Any:
        # By default, TCPStore would listen on all network interfaces.
        listener = socket.create_server((self._host, 0))
        port = listener.getsockname()[1]
        return TCPStore(
            self._host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )

    def new_address(self) -> str:
        """The address for a new group, `host:port/prefix`, with a prefix not used before."""
        self._addresses += 1
        return f"{self._host}:{self.store.port}/{self._addresses}"


class Group:
    """This worker's process group, and the orders that its members agree on."""

    def __init__(self, rendezvous: Rendezvous | None = None) -> None:
        # torchrun sets rank and world size in the environment; a controller sends them later.
        launched = rendezvous is None
        self.rank = int(os.environ.get("RANK", "0")) if launched else 0
        self.world = int(os.environ.get("WORLD_SIZE", "1")) if launched else 1
        self.nodes = 1
        if launched:
            self._find_users_group()
        self._made = False
        """Whether we made the process group, not the user's script."""
        self._control: Any = None
        self._pending: tuple[Tensor, Any, int] | None = None
        self._boundaries_left = 0
        self.check_every = 1
        """Step boundaries between two checks for orders; rank 0 decides."""
        self.length_asked_in: tuple[int, int] | None = None
        """Rank 0's last broadcast: in which loop its code called len(loader); None before the first one."""
        self._rendezvous = rendezvous

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def form(self, *, generation: int, rank: int, world: int, nodes: int, store: str, backend: str) -> None:
        """Leave the current group and join the new one."""
        self.leave()
        refuse_users_group()
        self.rank, self.world, self.nodes = rank, world, nodes
        if world == 1:
            return
        try:
            self._meet(generation, store, backend)
        except (RuntimeError, ValueError, OSError) as error:
            raise PeerLostError(f"the group of {world} did not come together: {error}") from error

    def form_from_environment(self, backend: str) -> None:
        """Use the script's own group, or form one under torchrun, or train alone."""
        self._find_users_group()
        if self.world == 1:
            return
        self.nodes = max(self.world // int(os.environ.get("LOCAL_WORLD_SIZE", str(self.world))), 1)
        if not dist.is_initialized():
            self._made = True
            init_process_group(backend)
            atexit.register(self._leave_at_exit)
        self._make_control()

    def _find_users_group(self) -> None:
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def _make_control(self) -> None:
        """Make a group of CPUs for orders, which must not wait for the GPU."""
        gloo = dist.get_backend() == "gloo"
        self._control = dist.group.WORLD if gloo else dist.new_group(backend="gloo")

    def _meet(self, generation: int, store: str, backend: str) -> None:
        address, _, prefix = store.partition("/")
        host, _, port = address.rpartition(":")
        timeout = timedelta(seconds=_MEET_S)
        if self.rank == 0 and self._rendezvous is not None:
            base = self._rendezvous.store
        else:
            base = TCPStore(host, int(port), is_master=False, timeout=timeout)
        base.set_timeout(timeout)
        name = f"{prefix}-{generation}"
        self._made = True
        init_process_group(
            backend,
            store=PrefixStore(name, base),
            rank=self.rank,
            world_size=self.world,
            timeout=timedelta(seconds=_EXCHANGE_S),
        )
        self._make_control()

    def leave(self) -> None:
        with suppress(PeerLostError):
            self._take(compare=False)
        self._boundaries_left, self.length_asked_in = 0, None
        self._control = None
        if self._made and dist.is_initialized():
            dist.destroy_process_group()
        self._made = False
        if self._rendezvous is not None:
            self.rank, self.world, self.nodes = 0, 1, 1

    def _leave_at_exit(self) -> None:
        """Leave the group at exit, or its threads may abort the process.

        Not after an exception: peers may be waiting for this worker, and it must not wait for them.
        """
        if hasattr(sys, "last_value"):
            return
        end_s = time.monotonic() + _EXIT_S
        while self._pending is not None and not self._pending[1].is_completed():
            if time.monotonic() > end_s:
                return
            time.sleep(0.01)
        self.leave()

    def start_sum(self, tensor: Tensor) -> Any:
        """Start to sum a tensor over all workers, in place."""
        with _peer_errors():
            return dist.all_reduce(tensor, async_op=True)

    def sum(self, tensor: Tensor) -> Tensor:
        if self.world > 1:
            wait_for(self.start_sum(tensor))
        return tensor

    def sum_between_cpus(self, tensor: Tensor) -> Tensor:
        if self.world == 1:
            return tensor
        if self._control is None:
            raise InputError(
                f"the group of {self.world} workers has not formed.",
                remedy="Call it after run.epochs() has begun and before run.finish().",
            )
        with _peer_errors():
            wait_for(dist.all_reduce(tensor, group=self._control, async_op=True))
        return tensor

    def tell(self, numbers: Sequence[float]) -> list[float]:
        """Broadcast rank 0's numbers; the other workers pass as many of any value."""
        if self.world == 1:
            return list(numbers)
        told = torch.tensor(numbers, dtype=torch.float64)
        with _peer_errors():
            dist.broadcast(told, src=0, group=self._control)
        return [float(number) for number in told]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The numbers of every worker, by rank; all must pass equally many."""
        own = torch.tensor(numbers, dtype=torch.int64)
        return [[int(number) for number in one] for one in self._gathered(own)]

    def gather_bytes(self, content: bytes) -> list[bytes]:
        """The bytes of every worker, by rank."""
        sizes = [size for (size,) in self.gather([len(content)])]
        own = torch.zeros(max(sizes), dtype=torch.uint8)
        own[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        everyones = zip(self._gathered(own), sizes, strict=True)
        return [bytes(one[:size].numpy().tobytes()) for one, size in everyones]

    def _gathered(self, own: Tensor) -> list[Tensor]:
        everyones = [torch.empty_like(own) for _ in range(self.world)]
        with _peer_errors():
            dist.all_gather(everyones, own, group=self._control)
        return everyones

    def spread(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """Overwrite the tensors on all workers with rank 0's values, in one exchange."""
        if self.world == 1 or not tensors:
            return
        # As bytes, tensors of all types fit in one message, which every backend can send.
        where = device if dist.get_backend() == "nccl" else torch.device("cpu")
        pieces = [as_bytes(tensor.detach()).to(where) for tensor in tensors]
        together = torch.cat(pieces)
        with _peer_errors():
            dist.broadcast(together, src=0)
        if self.is_leader:
            return
        for tensor, piece in zip(tensors, together.split([one.numel() for one in pieces]), strict=True):
            tensor.detach().copy_(piece.clone().view(tensor.dtype).view(tensor.shape))

    def agree(
        self,
        next_order: Callable[[], GroupOrder | None],
        *,
        at_once: bool = False,
        step_hash: int = 0,
        length_asked_in: tuple[int, int] = _NOT_ASKED,
    ) -> GroupOrder | None:
        """The order that all workers obey now. All call this at the same boundaries; rank 0 decides.

        Rank 0's `next_order` is broadcast during the next steps, and obeyed at the next check; `at_once`
        means now. `step_hash` describes the optimizer steps so far: DivergedError if it differs from rank
        0's. `length_asked_in` is the loop in which the code called len(loader); rank 0's is used.
        """
        if self.world == 1:
            self.length_asked_in = length_asked_in
            return next_order()
        self._boundaries_left -= 1
        if self._boundaries_left > 0 and not at_once:
            return None
        agreed = self._take()
        if agreed is not None and agreed.code in ENDS_GROUP:
            return agreed
        if at_once and agreed is not None:
            return agreed
        # Until this order is obeyed, a new one would be meant for the old group.
        self._send(next_order if agreed is None else lambda: None, step_hash, length_asked_in)
        if at_once:
            return self._take()
        return agreed

    def _send(
        self, next_order: Callable[[], GroupOrder | None], step_hash: int, length_asked_in: tuple[int, int]
    ) -> None:
        order = (next_order() if self.is_leader else None) or GroupOrder(OrderKind.NOTHING)
        numbers = [order.code, order.first, order.second, self.check_every, step_hash, *length_asked_in]
        note = torch.tensor(numbers, dtype=torch.int64)
        with _peer_errors():
            work = dist.broadcast(note, src=0, group=self._control, async_op=True)
        self._pending = (note, work, step_hash)

    def _take(self, *, compare: bool = True) -> GroupOrder | None:
        if self._pending is None:
            return None
        note, work, own_step_hash = self._pending
        self._pending = None
        wait_for(work)
        code, first, second, self._boundaries_left, step_hash, *length_asked_in = (
            int(value) for value in note
        )
        self.length_asked_in = (length_asked_in[0], length_asked_in[1])
        if compare and step_hash != own_step_hash:
            raise DivergedError(
                f"worker {self.rank} called optimizer.step() in other batches than worker 0, so they no "
                "longer hold the same model. The script's own batch counter begins at 0 in a worker that "
                "joins later.",
                remedy="Step with every batch, and let per_worker_batch of run.prepare split large ones; "
                "keep counters with run.keep().",
            )
        return None if code == OrderKind.NOTHING else GroupOrder(OrderKind(code), first, second)

    @_peer_errors()
    def share(
        self, packed: Packed | None, device: torch.device, own: Packed = NOTHING
    ) -> tuple[bytes, Sequence[Tensor]]:
        """Send rank 0's header and tensors to all. The others pass None, and receive into `own` tensors."""
        length = torch.tensor([len(packed.header) if packed else 0], dtype=torch.int64)
        dist.broadcast(length, src=0, group=self._control)
        text = (
            torch.frombuffer(bytearray(packed.header), dtype=torch.uint8)
            if packed
            else torch.empty(int(length), dtype=torch.uint8)
        )
        dist.broadcast(text, src=0, group=self._control)
        header = packed.header if packed else bytes(text.numpy().tobytes())
        tensors = packed.tensors if packed else receive_buffers(header, device, own)
        for tensor in tensors:
            if tensor.numel():
                self._broadcast(tensor, device)
        return header, tensors

    def _broadcast(self, tensor: Tensor, device: torch.device) -> None:
        """Broadcast with NCCL from GPU to GPU if the group has it, else between CPUs."""
        there = tensor.to(device) if dist.get_backend() == "nccl" else tensor
        dist.broadcast(as_bytes(there.detach()), src=0)
        if self.rank != 0 and there is not tensor:
            tensor.copy_(there)


def own_device() -> torch.device:
    """The GPU of this process: the one for LOCAL_RANK, set by torchrun, or the only visible one."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def backend_for(device: torch.device) -> str:
    """The torch.distributed backend for workers with such a device."""
    return os.environ.get("STRETTO_BACKEND") or ("nccl" if device.type == "cuda" else "gloo")
