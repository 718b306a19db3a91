"""Names and addresses of machines."""

import re
import socket
import subprocess
from itertools import product

import psutil

from megappo.launch.errors import LaunchError

_BRACKETS = re.compile(r"\[([^\]]*)\]")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a Slurm list: `n[1-3,07],gpu5` is n1, n2, n3, n07, gpu5.

    Raises:
        LaunchError: it is no such list.
    """
    parts = [part for part in re.split(r",(?![^\[]*\])", text) if part]
    return [host for part in parts for host in _expand(part)]


def _expand(part: str) -> list[str]:
    fixed = _BRACKETS.split(part)[::2]
    ranges = [_numbers(inner) for inner in _BRACKETS.findall(part)]
    return ["".join(a + b for a, b in zip(fixed, (*numbers, ""))) for numbers in product(*ranges)]


def _numbers(inner: str) -> list[str]:
    """Return the numbers of `1-3,07` as they are written, leading zeros included."""
    found: list[str] = []
    for piece in inner.split(","):
        first, _, last = piece.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise LaunchError(f"[{inner}] in a list of hosts cannot be read (expected for example n[1-3,7])")
        found += [f"{number:0{len(first)}}" for number in range(int(first), int(last or first) + 1)]
    return found


def resolve(host: str) -> str:
    """Return the address of a host. Slurm may know a node under a name that no name service has.

    Raises:
        LaunchError: nobody knows it.
    """
    try:
        return _lookup(host)
    except OSError as error:
        address = _slurm_address(host)
        if address is None:
            remedy = "give one that every node can reach, by name or number"
            raise LaunchError(f"head address {host}: {error} ({remedy})") from error
        return address


def _lookup(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _slurm_address(host: str) -> str | None:
    """Return the address that Slurm has for a node; None where it has none or there is no Slurm."""
    try:
        shown = subprocess.run(["scontrol", "show", "node", "-o", host], capture_output=True, text=True, timeout=30)
        found = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        return None if found is None else _lookup(found.group(1))
    except (OSError, subprocess.TimeoutExpired):
        return None


def own_address(head: str, *, is_head: bool) -> str:
    """Return the address of this node on the way to the head's. Nothing is sent."""
    if is_head:
        return head
    family = socket.AF_INET6 if ":" in head else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((head, 9))
        except OSError as error:
            raise LaunchError(f"node {socket.gethostname()} has no way to {head}: {error}") from error
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the network interface that has an address."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in addresses):
            return name
    return None


def free_port(address: str) -> int:
    """Return a port that nobody listens on at the address."""
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def check_port(address: str, port: int) -> None:
    """Check that a port can be listened on.

    Raises:
        LaunchError: it is taken, and by whom; or the address is none of this machine.
    """
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
            probe.listen()
        except OSError as error:
            raise LaunchError(_cannot_listen(address, port, error)) from error


def _cannot_listen(address: str, port: int, error: OSError) -> str:
    host = socket.gethostname()
    if interface_of(address) is None:
        return f"head address {address} is none of {host}, which is node 0 (give an address of node 0)"
    return f"port {port} of {host} ({address}) is taken: {_holder(port) or error} (give another one, on all nodes)"


def _holder(port: int) -> str | None:
    """Return who listens on a port, as far as this user may know."""
    try:
        listening = [
            entry
            for entry in psutil.net_connections(kind="tcp")
            if entry.status == psutil.CONN_LISTEN and entry.laddr and entry.laddr[1] == port
        ]
    except psutil.Error:
        return None
    for entry in listening:
        if entry.pid is None:
            return "a process of another user has it"
        try:
            process = psutil.Process(entry.pid)
            return f"process {entry.pid} of {process.username()} has it: {' '.join(process.cmdline())[:120]}"
        except psutil.Error:
            continue
    return None
