"""System calls that the kernel refuses this process and its threads from now on: systems that lack something, by seccomp."""

from __future__ import annotations

import ctypes
import errno
import platform
import socket
import struct

_SYSCALLS = {  # asm/unistd.h
    "x86_64": {"memfd_create": 319, "pidfd_open": 434, "fcntl": 72, "socket": 41},
    "aarch64": {"memfd_create": 279, "pidfd_open": 434, "fcntl": 25, "socket": 198},
}
_F_ADD_SEALS = 1033
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06  # BPF_LD|W|ABS, BPF_JMP|JEQ|K, BPF_RET|K
_NUMBER_AT, _ARGUMENTS_AT = 0, 16  # in struct seccomp_data
_USES = {  # of a call, with one value of an argument: call, number of the argument, value, what the kernel says
    "sealing": ("fcntl", 1, _F_ADD_SEALS, errno.EINVAL),
    "unix sockets": ("socket", 0, socket.AF_UNIX, errno.EAFNOSUPPORT),
}


def refuse(call: str) -> None:
    """``call``: ``memfd_create``, ``pidfd_open``, or one of `_USES`. For good."""
    numbers = _SYSCALLS[platform.machine()]
    if call in _USES:
        name, argument, value, refusal = _USES[call]
        rules = [
            (_LOAD, 0, 0, _NUMBER_AT),
            (_EQUAL, 0, 3, numbers[name]),
            (_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument),
            (_EQUAL, 0, 1, value),
            (_RETURN, 0, 0, _ERRNO | refusal),
            (_RETURN, 0, 0, _ALLOW),
        ]
    else:
        rules = [
            (_LOAD, 0, 0, _NUMBER_AT),
            (_EQUAL, 0, 1, numbers[call]),
            (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
            (_RETURN, 0, 0, _ALLOW),
        ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    # struct sock_fprog: how many rules, and where they are
    filter_ = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, filter_, 0, 0):
        raise OSError(ctypes.get_errno(), f"no seccomp filter against {call}")
