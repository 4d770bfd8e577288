"""Who the code of jobs runs as: the node's user, never root where others can reach the node."""

import os
import pwd

from chassis.security import SecurityError, is_loopback

ALLOW_ROOT = "HETERPS_ALLOW_ROOT"


def settle(user: str, host: str, allow_root: bool) -> None:
    """Become `user`, if one is named, and refuse to be root where jobs come from other machines.

    Args:
        user: whom root gives itself up for, for good; empty to stay.
        host: where the node listens.
        allow_root: stay root all the same.

    Raises:
        SecurityError: the user is unknown or may not be become; or root would run jobs' code.
    """
    if user:
        _become(user)
    elif os.geteuid() == 0 and not is_loopback(host) and not allow_root:
        raise SecurityError(
            f"refusing to run jobs as root at {host}: whoever may submit would own this host. "
            "Expected --user NAME, which root becomes, another user to begin with, or --allow-root "
            f"({ALLOW_ROOT}=1)"
        )


def _become(user: str) -> None:
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise SecurityError(f"--user {user}: unknown here; expected a user's name") from None
    if account.pw_uid == os.geteuid():
        return
    if os.geteuid() != 0:
        raise SecurityError(
            f"--user {user}: only root may become another; expected to be started as root or "
            f"as {user}"
        )
    os.initgroups(user, account.pw_gid)
    os.setresgid(account.pw_gid, account.pw_gid, account.pw_gid)
    os.setresuid(account.pw_uid, account.pw_uid, account.pw_uid)
    os.environ.update(HOME=account.pw_dir, USER=user, LOGNAME=user)
