"""Writes the files of a lab before it starts: each host's disk, the keys, and the inventory for `kit up`.

A host's disk is the upper folder of an overlay over this machine's ``/``, so the host has everything that the machine
has: python, torch, rsync. Files that must be the host's own are put into the upper folder here. The host may or may not
see files that the machine gets *after* the host has started: the kernel does not define changes below a mounted
overlay.
"""

import json
import os
import pwd
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from nodekit.inventory.errors import KitError

# Without the post-quantum key exchanges: each takes 0.14 s of processor time, and nobody can eavesdrop on one
# machine.
SSHD_CONFIG = """\
KexAlgorithms -sntrup*,mlkem*
HostKey /etc/ssh/ssh_host_ed25519_key
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
UseDNS no
PrintMotd no
PrintLastLog no
PidFile none
MaxStartups 200
MaxSessions 200
AcceptEnv LANG LC_*
Subsystem sftp internal-sftp
"""


def root_home() -> Path:
    """Return root's home folder, the same on this machine and on every host."""
    return Path(pwd.getpwuid(0).pw_dir)


def search_path() -> str:
    """Return PATH with the folders of sshd and ip, which an unprivileged login's PATH may lack."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"])


def make_key(path: Path, *, comment: str) -> str:
    """Create an ed25519 key without a passphrase; return the public key, ``ssh-ed25519 AAAA…``."""
    argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)]
    answer = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=15, env=environment()
    )
    if answer.returncode != 0:
        raise KitError(f"ssh-keygen could not make {path}: {answer.stderr.strip()}")
    return " ".join(Path(f"{path}.pub").read_text().split()[:2])


def environment() -> dict[str, str]:
    """Return the environment for programs that the lab starts on this machine."""
    return {**os.environ, "PATH": search_path(), "LC_ALL": "C"}


def write_disk(
    folder: Path,
    *,
    name: str,
    addresses: dict[str, str],
    public_key: str,
    hidden: Iterable[Path],
    shared: Iterable[Path] = (),
    daemons: Iterable[list[str]] = (),
    has_sshd: bool = True,
) -> str:
    """Make a host's folder (disk, mount point, ``boot.json``) for lab_host.py; return its public host key.

    Args:
        folder: the host's folder in the lab.
        name: the host's name.
        addresses: name → address of every machine that the host should know by name.
        public_key: the key that may log in as root.
        hidden: folders of this machine that are empty in the host.
        shared: folders of this machine that the host shares, at the same path.
        daemons: commands that the host runs one after the other when it boots; each goes to the background when it
            is ready.
        has_sshd: whether the host starts sshd, before the daemons.
    """
    for part in ("upper", "work", "root"):
        (folder / part).mkdir(parents=True)
    disk = folder / "upper"
    hidden = [path.resolve() for path in hidden]
    for path in hidden:
        if any(path != other and path.is_relative_to(other) for other in hidden):
            continue  # empty already, as its parent is
        os.setxattr(make_folder(disk, path), "trusted.overlay.opaque", b"y")
    ssh = make_folder(disk, Path("/etc/ssh"))
    (ssh / "sshd_config").write_text(SSHD_CONFIG)
    host_key = make_key(ssh / "ssh_host_ed25519_key", comment=f"root@{name}")
    (disk / "etc/hostname").write_text(f"{name}\n")
    (disk / "etc/hosts").write_text(hosts_file(name, addresses))
    (disk / "etc/resolv.conf").write_text(
        "# A lab host knows the other hosts by /etc/hosts; nothing else is in reach.\n"
    )
    (disk / "etc/shadow").touch(mode=0o600)
    (disk / "etc/shadow").write_text(_unlock_root(Path("/etc/shadow").read_text()))
    home = make_folder(disk, root_home().resolve())
    for startup_file in (".bashrc", ".profile"):
        (home / startup_file).touch()
    (home / ".ssh").mkdir(mode=0o700)
    (home / ".ssh/authorized_keys").write_text(f"{public_key} lab\n")
    prefixes = sorted({sys.prefix, sys.base_prefix})
    boot = {
        "hostname": name,
        "sshd": shutil.which("sshd", path=search_path()) if has_sshd else None,
        "python_prefixes": [each for each in prefixes if _is_missing_in_host(Path(each), hidden)],
        "shared": [str(path) for path in shared],
        "daemons": list(daemons),
    }
    (folder / "boot.json").write_text(json.dumps(boot))
    return host_key


def hosts_file(name: str, addresses: dict[str, str]) -> str:
    """Return ``/etc/hosts`` as on Debian, with the host's own name at 127.0.1.1, and the lab's machines."""
    lines = ["127.0.0.1 localhost", f"127.0.1.1 {name}", "::1 localhost ip6-localhost ip6-loopback"]
    lines += [f"{address} {other}" for other, address in addresses.items()]
    # torch looks up its peers in this form, and warns of each that has no name.
    lines += [f"::ffff:{address} {other}.lab" for other, address in addresses.items()]
    return "\n".join(lines) + "\n"


def known_hosts_file(addresses: dict[str, str], host_keys: dict[str, str]) -> str:
    """Return a known_hosts file with addresses and names."""
    return "".join(f"{addresses[name]},{name} {key}\n" for name, key in host_keys.items())


def inventory_file(
    name: str,
    *,
    network: str,
    identity_file: Path,
    known_hosts: Path,
    addresses: dict[str, str],
    folder_option: str,
) -> str:
    """Return the inventory of a lab; ``folder_option`` is the option that `kit lab` needs to find the lab."""
    num = len(addresses)
    nodes = f"nodes: '{num - 1}:{num}'  # goes on with {num - 1} when one is cut off\n" if num > 1 else ""
    hosts = "".join(f"  {host}: {{address: {address}, gpus: 0}}\n" for host, address in addresses.items())
    return f"""\
# A lab: {len(addresses)} hosts on this machine, each with its own network, disk, processes and sshd.
# Train on them with `kit up THIS_FILE`. Meanwhile try, in another terminal, one of these, and what undoes it:
#   kit lab crash HOST{folder_option}
#   kit lab revive HOST{folder_option}
#   kit lab cut HOST{folder_option}
#   kit lab mend HOST{folder_option}
# This removes everything, this file too:
#   kit lab down{folder_option}
name: {_quoted(name)}
network: {network}  # every host's interface has another name: kit uses the one with an address in here
user: root
identity_file: {_quoted(identity_file)}
known_hosts: {_quoted(known_hosts)}  # the hosts' keys, so that there is nothing to accept
python: {_quoted(sys.executable)}  # this machine's: the hosts see its files, and keep their own changes
workdir: ~/nodekit
{nodes}hosts:  # without this machine's GPUs, also where it has some
{hosts}"""


def slurm_inventory_file(name: str, *, num_hosts: int, conf: Path, shared_dir: Path) -> str:
    """Return the inventory with which `kit up` submits jobs to a lab's Slurm."""
    nodes = f"'{num_hosts - 1}:{num_hosts}'  # goes on with {num_hosts - 1} when one is lost"
    return f"""\
# A lab's Slurm cluster. `kit up THIS_FILE` submits a job to it, where Slurm's commands mean this cluster:
#   export SLURM_CONF={shlex.quote(str(conf))}
name: {_quoted(name)}
python: {_quoted(sys.executable)}  # this machine's: the hosts see its files, and keep their own changes
slurm:
  nodes: {nodes if num_hosts > 1 else 1}
  partition: main
  shared_dir: {_quoted(shared_dir)}  # the same folder on this machine and every host
"""


def _quoted(text: Path | str) -> str:
    return json.dumps(str(text), ensure_ascii=False)  # a JSON string is a YAML string


def make_folder(disk: Path, path: Path) -> Path:
    """Create a folder on the disk, with owners and modes of the machine's folders along the path."""
    source, target = Path("/"), disk
    for part in path.parts[1:]:
        source, target = source / part, target / part
        if not target.exists():
            target.mkdir()
            if source.is_dir():
                shutil.copystat(source, target)
                os.chown(target, source.stat().st_uid, source.stat().st_gid)
    return target


def _unlock_root(shadow: str) -> str:
    """Return /etc/shadow with root unlocked, but no password: sshd refuses locked accounts (``!``) even with a key."""
    lines = (line.split(":") for line in shadow.splitlines())
    return "".join(":".join(["root", "*", *line[2:]] if line[0] == "root" else line) + "\n" for line in lines)


def _is_missing_in_host(prefix: Path, hidden: list[Path]) -> bool:
    """Whether a folder is not visible in the overlay: it is hidden, or on another file system than ``/``."""
    real = prefix.resolve()
    return real.stat().st_dev != Path("/").stat().st_dev or any(real.is_relative_to(path) for path in hidden)
