"""Run a program that a model wrote, from standard input: `python -I judged_program.py MARK SECONDS`.

Prints MARK as the last line if the program ends without an error. The program is confined as far as the system allows:
no network, no file written or removed, 1 GiB of memory, SECONDS of processor time.
"""

import ctypes
import os
import resource
import struct
import sys

MEMORY_BYTES = 2**30
NOBODY_UID = 65534
NEW_USER, NEW_NETWORK, NEW_IPC = 0x10000000, 0x40000000, 0x08000000
NO_NEW_PRIVILEGES = 38  # PR_SET_NO_NEW_PRIVS of prctl(2).
CREATE_RULESET, RESTRICT_SELF = 444, 446  # System call numbers of landlock_create_ruleset and landlock_restrict_self.
WRITE_RIGHTS = 0b1111111110010  # Landlock access rights (ABI version 1) to write, remove and create files.


def confine(seconds: int) -> None:
    """Drop every privilege that a program of functions and assertions does not need."""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.getuid() == 0:
        libc.unshare(NEW_NETWORK | NEW_IPC)
        os.setgid(NOBODY_UID)
        os.setuid(NOBODY_UID)
    else:
        libc.unshare(NEW_USER | NEW_NETWORK | NEW_IPC)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    rules = struct.pack("Q", WRITE_RIGHTS)
    ruleset = libc.syscall(CREATE_RULESET, rules, len(rules), 0)
    # A ruleset without rules denies WRITE_RIGHTS on every path. The result is negative if the system lacks Landlock.
    if ruleset >= 0:
        libc.syscall(RESTRICT_SELF, ruleset, 0)
    for limit, maximum in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (maximum, maximum))


def main() -> None:
    success_mark, seconds, program = sys.argv[1], int(sys.argv[2]), sys.stdin.read()
    sys.argv[1:] = []
    confine(seconds)
    exec(compile(program, "the answer", "exec"), {"__name__": "answer"})
    sys.stdout.write(f"\n{success_mark}\n")


if __name__ == "__main__":
    main()
