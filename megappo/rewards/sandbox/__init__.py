"""Runs programs that nobody vouches for: no network, no files but their own, limits on all they take, no survivors.

`host` starts the sandbox and reads what happened in it. `inside` is what runs in it: a folder of scripts of the
standard library alone, started with `python inside`, and no package of ours, because none of ours is to be seen there.

What it is made of (Linux 5.14 or later, no further program, no root): namespaces for users, mounts, processes, network
and IPC; a file tree of its own; resource limits; a seccomp filter; and process 1, which watches time, memory and
output. There is no weaker mode: where the kernel or the container does not allow it, `host` raises CapabilityError with
the step that was refused.
"""
