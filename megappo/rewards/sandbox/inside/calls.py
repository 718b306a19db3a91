"""Which system calls a program may not make, as a seccomp filter.

Refused with EPERM:

- sockets but those of the Unix kind: not every kind of socket is bound to a network namespace (AF_VSOCK reaches the
  host of a virtual machine).
- memory that belongs to no process, and so to no limit: memfd_create, memfd_secret, System V IPC.
- what looks into other processes or programs the kernel: ptrace, process_vm_*, bpf, perf_event_open, userfaultfd,
  io_uring_setup (it makes sockets too), keys (which are not bound to a namespace).
- namespaces and mounts.
"""

import struct

from kernel import machine

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SOCKET = {"x86_64": 41, "aarch64": 198}
_REFUSED = {
    "x86_64": {
        "shmget": 29,
        "semget": 64,
        "msgget": 68,
        "ptrace": 101,
        "mount": 165,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "perf_event_open": 298,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "memfd_create": 319,
        "bpf": 321,
        "userfaultfd": 323,
    },
    "aarch64": {
        "mount": 40,
        "unshare": 97,
        "ptrace": 117,
        "msgget": 186,
        "semget": 190,
        "shmget": 194,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "perf_event_open": 241,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "memfd_create": 279,
        "bpf": 280,
        "userfaultfd": 282,
    },
}
# Numbers above 423 are the same on all machines.
_REFUSED_EVERYWHERE = {"io_uring_setup": 425, "memfd_secret": 447}
_X32_BIT = 0x40000000
_AF_UNIX = 1
_EPERM = 1

# BPF instructions (linux/filter.h) and what they see (struct seccomp_data: nr, arch, instruction pointer, arguments).
_LOAD, _JUMP_IF_EQUAL, _JUMP_IF_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050000 | _EPERM, 0x80000000


def call_filter() -> list[bytes]:
    """Return the filter's instructions for this machine, little-endian."""
    name = machine()
    refused = [*_REFUSED[name].values(), *_REFUSED_EVERYWHERE.values()]
    return [
        _instruction(_LOAD, _ARCHITECTURE_AT),
        # Calls of another architecture, 32-bit ones among them, have other numbers.
        _instruction(_JUMP_IF_EQUAL, _ARCHITECTURES[name], then=1),
        _instruction(_RETURN, _KILL),
        _instruction(_LOAD, _NUMBER_AT),
        _instruction(_JUMP_IF_AT_LEAST, _X32_BIT, otherwise=1),
        _instruction(_RETURN, _KILL),
        *(
            instruction
            for number in refused
            for instruction in (
                _instruction(_JUMP_IF_EQUAL, number, otherwise=1),
                _instruction(_RETURN, _REFUSE),
            )
        ),
        _instruction(_JUMP_IF_EQUAL, _SOCKET[name], then=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_LOAD, _FIRST_ARGUMENT_AT),
        _instruction(_JUMP_IF_EQUAL, _AF_UNIX, otherwise=1),
        _instruction(_RETURN, _ALLOW),
        _instruction(_RETURN, _REFUSE),
    ]


def _instruction(code: int, operand: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, operand)
