"""Runs one program that nobody trusts: a Python program that a policy wrote.

bubblewrap gives it namespaces of its own (no network, no other process in sight), no file but Python's own, an empty
home and /tmp in memory, and no capabilities; a seccomp filter refuses new processes; limits bound its time, memory,
files and output. Works as root and as an ordinary user, wherever user namespaces are allowed; where they are not,
`check` says so, and nothing is ever run without them.
"""

import errno
import math
import os
import platform
import shutil
import struct
import subprocess
import sys

from configs.schema import ConfigError

PROGRAM_BYTES = 100_000  # longest program: it travels as one argument, and Linux allows 128 KiB
OUTPUT_BYTES = 4 << 20  # bytes that a program may print, or write to one file
FILES_BYTES = 16 << 20  # bytes of each of its two private file systems, /tmp and /box

# Runs inside the sandbox. Tests are read after the program has run, from a descriptor of their own, so a program that
# reads its standard input or exits early passes nothing. One that rewires the interpreter could: such tests have to
# live in its process. Cases of stdin and stdout are compared outside and have no such gap.
HARNESS = """
import json, os, resource, sys
program, kind, seconds, memory, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
for name, limit in dict(AS=memory, CPU=seconds, FSIZE=size, NOFILE=64, CORE=0).items():
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (limit, limit))
if kind == "stdin":
    exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
else:
    tests = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    space = {"__name__": "program"}
    exec(compile(program, "program.py", "exec"), space)
    text, token = json.load(tests)
    exec(compile(text, "tests.py", "exec"), space)
    sys.stdout.flush()
    os.write(1, ("\\n" + token + "\\n").encode())
"""


def no_new_processes() -> bytes:
    """A seccomp filter that refuses fork, so that the memory limit of one process is that of all; threads are fine."""
    arch, clone, clone3, forks = {
        "x86_64": (0xC000003E, 56, 435, (57, 58)),
        "aarch64": (0xC00000B7, 220, 435, ()),
    }[platform.machine()]
    load, jump_equal, jump_at_least, jump_set, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, kill, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000, 0x00050000 | errno.ENOSYS
    program = [(load, 0, 0, 4), (jump_equal, 1, 0, arch), (give, 0, 0, kill), (load, 0, 0, 0)]
    program += [(jump_at_least, 0, 1, 0x40000000), (give, 0, 0, kill)]  # x86's second system-call table
    program += [(jump_equal, 0, 1, clone3), (give, 0, 0, unknown)]  # its flags are out of reach; libc then uses clone
    for fork in forks:
        program += [(jump_equal, 0, 1, fork), (give, 0, 0, refuse)]
    program += [(jump_equal, 0, 3, clone), (load, 0, 0, 16), (jump_set, 1, 0, 0x10000), (give, 0, 0, refuse)]
    return b"".join(struct.pack("HBBI", *line) for line in program + [(give, 0, 0, allow)])


def run(program: str, kind: str, stdin: str, seconds: float, memory: int) -> tuple[int, str]:
    """(exit status, standard output) of a Python program of at most PROGRAM_BYTES.

    kind "stdin": `stdin` is its standard input. kind "tests": `stdin` is JSON [tests, token]; the tests, Python source,
    run in the program's namespace after it, and `token` is printed on a line of its own once they are through.
    `memory` is in bytes. Raises subprocess.TimeoutExpired after `seconds`; everything inside is killed.
    """
    root = ["--size", str(FILES_BYTES), "--tmpfs", "/tmp", "--size", str(FILES_BYTES), "--tmpfs", "/box"]
    for path in dict.fromkeys(["/usr", "/bin", "/lib", "/lib64", sys.base_prefix, sys.prefix]):
        if os.path.islink(path):
            root += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            root += ["--ro-bind", path, path]
    filter_fd = os.memfd_create("seccomp")
    os.write(filter_fd, no_new_processes())
    os.lseek(filter_fd, 0, os.SEEK_SET)
    command = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
    command += ["--die-with-parent", "--new-session", "--clearenv", *root, "--dev", "/dev", "--chdir", "/box"]
    command += ["--setenv", "HOME", "/box", "--setenv", "OPENBLAS_NUM_THREADS", "1"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/", "--seccomp", str(filter_fd)]
    command += [sys.executable, "-I", "-c", HARNESS, program, kind]
    command += [str(math.ceil(seconds)), str(memory), str(OUTPUT_BYTES)]
    with open(os.memfd_create("output"), "w+b") as output:  # a file and no pipe: its size is limited as any file's
        try:
            done = subprocess.run(
                command,
                input=stdin.encode(),
                stdout=output,
                stderr=subprocess.DEVNULL,
                pass_fds=(filter_fd,),
                timeout=seconds,
            )
        finally:
            os.close(filter_fd)
        output.seek(0)
        return done.returncode, output.read().decode(errors="replace")


def check() -> None:
    """Raises ConfigError where programs cannot be isolated on this machine."""
    if shutil.which("bwrap") is None:
        raise ConfigError("needs bubblewrap to isolate programs (Debian: apt-get install bubblewrap)")
    if platform.machine() not in ("x86_64", "aarch64"):
        raise ConfigError(f"the sandbox knows x86_64 and aarch64, not {platform.machine()}")
    status, output = run("print(6 * 7)", "stdin", "", seconds=60.0, memory=512 << 20)
    if (status, output) != (0, "42\n"):
        raise ConfigError(
            "bubblewrap cannot make a sandbox here: allow user namespaces (in a container: "
            "--security-opt seccomp=unconfined)"
        )
