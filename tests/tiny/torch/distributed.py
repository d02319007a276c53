"""Bedplate test stand-in, not PyTorch: collectives over the processes of one machine.

Rank 0 listens on a loopback port and writes it to the file of the rendezvous; the others connect, send what
they have, and get the sum back. The additions are C (native/torch_python.cpp): a wrong sum there is one here.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from datetime import timedelta

from torch import Tensor

_peers: list[socket.socket] = []  # of rank 0: all others, by rank; of the others: rank 0
_rank = 0


def is_available() -> bool:
    """Return True."""
    return True


def is_gloo_available() -> bool:
    """Return True: this transport answers to that name."""
    return True


def is_nccl_available() -> bool:
    """Return False."""
    return False


def init_process_group(backend: str, *, init_method: str, rank: int, world_size: int, timeout: timedelta) -> None:
    """Meet the other ranks through the file that init_method names (file:///path)."""
    if backend != "gloo":
        raise RuntimeError(f"this stand-in has no backend {backend}")
    global _rank
    _rank = rank
    path = init_method[len("file://") :]
    seconds = timeout.total_seconds()
    deadline = time.monotonic() + seconds
    if rank:
        while not os.path.exists(path):
            if time.monotonic() > deadline:
                raise RuntimeError("rendezvous timed out: rank 0 did not come")
            time.sleep(0.01)
        with open(path, encoding="ascii") as stream:
            peer = socket.create_connection(("127.0.0.1", int(stream.read())), timeout=seconds)
        peer.sendall(struct.pack("<I", rank))
        _peers.append(peer)
        return
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(seconds)
        with open(path + ".new", "w", encoding="ascii") as stream:
            stream.write(str(server.getsockname()[1]))
        os.rename(path + ".new", path)
        arrived = {}
        while len(arrived) < world_size - 1:
            peer, _ = server.accept()
            peer.settimeout(seconds)
            arrived[struct.unpack("<I", _receive(peer, 4))[0]] = peer
    _peers.extend(arrived[number] for number in sorted(arrived))


def all_reduce(tensor: Tensor) -> None:
    """Replace the elements on every rank by the sum over all ranks."""
    if _rank == 0:
        for peer in _peers:
            tensor.add_bytes(_receive(peer, len(tensor.data)))
        for peer in _peers:
            peer.sendall(tensor.data)
    else:
        _peers[0].sendall(tensor.data)
        tensor.data[:] = _receive(_peers[0], len(tensor.data))


def all_gather_into_tensor(output: Tensor, tensor: Tensor) -> None:
    """Put the elements of all ranks one after the other, by rank, into the output on every rank."""
    size = len(tensor.data)
    if _rank == 0:
        output.data[:size] = tensor.data
        for number, peer in enumerate(_peers, 1):
            output.data[number * size : (number + 1) * size] = _receive(peer, size)
        for peer in _peers:
            peer.sendall(output.data)
    else:
        _peers[0].sendall(tensor.data)
        output.data[:] = _receive(_peers[0], len(output.data))


def reduce_scatter_tensor(output: Tensor, tensor: Tensor) -> None:
    """Put this rank's share of the sum over all ranks into the output; the input stays."""
    total = tensor.clone()
    all_reduce(total)
    size = len(output.data)
    output.data[:] = total.data[_rank * size : (_rank + 1) * size]


def barrier() -> None:
    """Return when every rank has come here."""
    if _rank == 0:
        for peer in _peers:
            _receive(peer, 1)
        for peer in _peers:
            peer.sendall(b"b")
    else:
        _peers[0].sendall(b"b")
        _receive(_peers[0], 1)


def destroy_process_group() -> None:
    """Close the connections."""
    while _peers:
        _peers.pop().close()


def _receive(peer: socket.socket, size: int) -> bytes:
    """Return exactly size bytes. Raises RuntimeError when the peer goes away."""
    parts = []
    while size:
        part = peer.recv(min(size, 1 << 20))
        if not part:
            raise RuntimeError("Connection closed by peer")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
