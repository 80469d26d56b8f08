"""Checks the requirements of a lab: root, a few programs, and a file system for the hosts' disks."""

import os
import shutil
from pathlib import Path

from nodekit.deploy.lab.lab_disk import search_path
from nodekit.deploy.lab.lab_network import call
from nodekit.inventory.errors import KitError

DEBIAN_PACKAGES = {
    "ip": "iproute2",
    "sshd": "openssh-server",
    "ssh-keygen": "openssh-client",
    "nsenter": "util-linux",
    "unshare": "util-linux",
    "mount": "mount",
    "umount": "mount",
}
"""Program → its Debian package."""
SLURM_PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
ACCOUNTING_PACKAGES = {
    "slurmdbd": "slurmdbd",
    "sacctmgr": "slurm-wlm",
    "mariadbd": "mariadb-server",
    "mariadb-install-db": "mariadb-server",
    "mariadb-admin": "mariadb-client",
}


def require_root() -> None:
    """Raise KitError unless this process is root's."""
    if os.geteuid() != 0:
        raise KitError(
            "a lab needs root, for its namespaces and mounts", cure="run this as root, or with sudo"
        )


def require_programs(*, slurm: bool, accounting: bool) -> None:
    """Raise KitError with the missing programs and the packages to install."""
    wanted = {
        **DEBIAN_PACKAGES,
        **(SLURM_PACKAGES if slurm else {}),
        **(ACCOUNTING_PACKAGES if accounting else {}),
    }
    if missing := [name for name in wanted if not shutil.which(name, path=search_path())]:
        packages = " ".join(sorted({wanted[name] for name in missing}))
        raise KitError(f"a lab needs {', '.join(missing)}", cure=f"on Debian, `apt-get install {packages}`")


def provide_disks(folder: Path) -> None:
    """Mount a tmpfs on ``hosts`` unless its file system can hold the upper folder of an overlay.

    Not every file system can; another overlay, such as the root of a container, cannot.
    """
    try:
        _try_overlay(folder / "hosts/trial")
    except KitError:
        call(["mount", "-t", "tmpfs", "nodekit-lab", "hosts"], doing="mount disks in memory", cwd=folder)
        _try_overlay(folder / "hosts/trial")


def _try_overlay(place: Path) -> None:
    for part in ("upper", "work", "root"):
        (place / part).mkdir(parents=True)
    options = "lowerdir=/,upperdir=upper,workdir=work"
    argv = ["unshare", "--mount", "mount", "-t", "overlay", "overlay", "-o", options, "root"]
    call(argv, doing="mount an overlay", cwd=place)
    shutil.rmtree(place)
