"""Who uses a folder, between processes: locks of the system that no death leaves behind.

    lease = share(folder)        # by whoever reads it, until lease.release()
    in_use(folder)               # asked by whoever would like to remove it

Notable: `flock` belongs to one opening of a folder, not to a process or a thread, so two readers in
one process count as two, and a descriptor that may only read suffices: a store that is mounted
read-only is leased like any other. The system ends a lease with its process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
import weakref
from pathlib import Path

log = logging.getLogger("hivlp.index")

RETRY_S = 0.001
NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF, errno.EINVAL, errno.ENOSYS})
"""What file systems answer that know no locks, or none on folders (some network ones)."""


class Lease:
    """A lock on a folder. Ends by `release`, with the object, or with the process."""

    def __init__(self, descriptor: int) -> None:
        # Not at exit: the process's end closes descriptors anyway, after its last thread.
        self._end = weakref.finalize(self, os.close, descriptor)
        self._end.atexit = False

    @property
    def held(self) -> bool:
        """Whether it still holds."""
        return self._end.alive

    def release(self) -> None:
        """End it. Doing so twice is fine, from any thread."""
        self._end()


def share(folder: Path) -> Lease:
    """Lease a folder for reading, beside others who read it.

    Raises FileNotFoundError for a folder that isn't there, or was moved away meanwhile. Where the
    file system knows no locks, the lease is one in name only, which the log says.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    lease = Lease(descriptor)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            break
        except BlockingIOError:  # for the moment of a probe or a publishing, or it is being removed
            _check_place(folder, lease, descriptor)
            time.sleep(RETRY_S)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("%s: read without a lease, it knows no locks: %s", folder, error)
            break
    _check_place(folder, lease, descriptor)
    return lease


def take(folder: Path) -> Lease | None:
    """Lease a folder for oneself alone; None where anybody else has a lease.

    Raises FileNotFoundError, and OSError where the file system knows no locks.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    lease = Lease(descriptor)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lease.release()
        return None
    except OSError:
        lease.release()
        raise
    _check_place(folder, lease, descriptor)
    return lease


def in_use(folder: Path) -> bool:
    """Whether anybody has a lease on a folder; also where the file system can't tell.

    A folder that isn't there is not in use.
    """
    try:
        lease = take(folder)
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True
    if lease is None:
        return True
    lease.release()
    return False


def _check_place(folder: Path, lease: Lease, descriptor: int) -> None:
    """Raise FileNotFoundError where the folder was moved away before the lock was there."""
    try:
        there = os.path.samestat(folder.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        there = False
    if not there:
        lease.release()
        raise FileNotFoundError(errno.ENOENT, "removed while it was being opened", str(folder))
