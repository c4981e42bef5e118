"""Several hosts on one machine: namespaces of network, processes and mounts, a bridge between them, sshd in each.

    test ── unshare ──► world   pid 1 of its own namespaces: the user's own machine, with the bridge
                          ├── unshare ──► host 10.77.0.10   pid 1, sshd
                          ├── unshare ──► host 10.77.0.11   ...

Everything lives in namespaces below the world's, and `unshare --kill-child` ties the world to the test: when either
ends, however it ends, the kernel ends every process in it and takes the interfaces down. Nothing outside is touched:
/tmp, the home directory, /run and /dev/shm are empty ones of each host.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

PREFIX = "10.77.0."
SWITCH = PREFIX + "1"
PACKAGES = {"ip": "iproute2", "sshd": "openssh-server", "ssh": "openssh-client", "rsync": "rsync", "uptime": "procps"}
UNSHARE = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
ROOT = Path(__file__).resolve().parents[2]
SSH_SERVER = """
AuthorizedKeysFile {home}/.ssh/authorized_keys
HostKey {directory}/host_key
LogLevel ERROR
PermitRootLogin prohibit-password
PidFile none
StrictModes no
UsePAM no
"""


def why_not() -> str:
    """Why there can be no such hosts here, and what would help; empty if there can."""
    if os.geteuid() != 0:
        return "namespaces with sshd need root"
    if missing := missing_packages():
        return f"not installed: {' '.join(missing)} (make cluster-tools installs them)"
    probe = subprocess.run([*UNSHARE, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        return f"the kernel allows no namespaces here: {probe.stderr.strip()}"
    inside = "ip link add br0 type bridge && ip link add name v0 type veth peer name v1 && mount -t tmpfs none /mnt"
    probe = subprocess.run([*UNSHARE, "sh", "-c", inside], capture_output=True, text=True, check=False)
    return f"no bridge or mount in a namespace: {probe.stderr.strip()}" if probe.returncode else ""


def missing_packages() -> list[str]:
    """Debian's packages of the programs that are not there."""
    return sorted({package for tool, package in PACKAGES.items() if find(tool) is None})


def find(tool: str) -> str | None:
    """Path of a program; sbin directories are not on everybody's PATH."""
    return shutil.which(tool, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")


def run(*command: str) -> None:
    """Run a command; its output is shown."""
    subprocess.run(command, check=True)


def empty(directory: str, keep: list[str]) -> None:
    """An empty directory over this one in our mount namespace; `keep` lists paths below that stay visible."""
    kept = [path for path in keep if Path(path).is_relative_to(directory) and Path(path).exists()]
    handles = [(path, os.open(path, os.O_PATH)) for path in kept]
    run("mount", "-t", "tmpfs", "-o", "mode=1777", "none", directory)
    for path, handle in handles:
        Path(path).mkdir(parents=True, exist_ok=True)
        subprocess.run(
            ["mount", "--no-canonicalize", "--bind", f"/proc/self/fd/{handle}", path], check=True, pass_fds=[handle]
        )
        os.close(handle)


def namespace(pid: int | str, kind: str) -> str:
    """Which namespace of a kind (`net`, `pid`) a process is in."""
    return str(Path(f"/proc/{pid}/ns/{kind}").readlink())


def own_places(keep: list[str]) -> None:
    """A machine's own temporary files, home, run-time files and shared memory."""
    for directory in ("/tmp", home(), "/run", "/dev/shm"):
        empty(directory, keep)


def home() -> str:
    """Root's home directory."""
    return pwd.getpwuid(0).pw_dir


def keep_paths(*more: str) -> list[str]:
    """What every host sees of this machine: the repository, the environment and its interpreter."""
    return [str(ROOT), sys.prefix, sys.base_prefix, *more]


def lay_switch() -> None:
    """The bridge, in the world's network namespace."""
    run("ip", "link", "set", "lo", "up")
    run("ip", "link", "add", "br0", "type", "bridge")
    run("ip", "address", "add", f"{SWITCH}/24", "dev", "br0")
    run("ip", "link", "set", "br0", "up")


class Host:
    """One host, as the world sees it.

    Args:
        address: its address behind the bridge, PREFIX + a number.
        public_key: who may log in as root.
        profile: shell commands of its .bashrc.
        keep: paths that it sees.
    """

    def __init__(self, address: str, public_key: str, profile: str, keep: list[str]) -> None:
        self.address = address
        number = address.rpartition(".")[2]
        command = [*UNSHARE, sys.executable, __file__, address, public_key, profile, *keep]
        self.process = subprocess.Popen(command)
        mine = namespace("self", "net")
        while namespace(self.process.pid, "net") == mine:
            time.sleep(0.01)
        run("ip", "link", "add", f"v{number}", "type", "veth", "peer", "name", "eth0", "netns", str(self.process.pid))
        run("ip", "link", "set", f"v{number}", "master", "br0", "up")

    def await_ssh(self, timeout_s: float = 30.0) -> None:
        """Until it takes connections."""
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                socket.create_connection((self.address, 22), timeout=1.0).close()
                return
            except OSError:
                assert time.monotonic() < end_s, f"no sshd at {self.address} after {timeout_s} s"
                time.sleep(0.1)

    def processes(self, name: str) -> list[int]:
        """Pids, as the world counts them, of this host's processes of a name."""
        (child,) = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        place = namespace(child, "pid")
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                if (
                    (entry / "comm").read_text().strip() == name
                    and namespace(entry.name, "pid") == place
                    and state != "Z"
                ):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended meanwhile
        return found


def be_host(address: str, public_key: str, profile: str, keep: list[str]) -> None:
    """Process 1 of a host: its network and directories, sshd, and the orphans that fall to it."""
    own_places(keep)
    directory, user_home = Path("/tmp/sshd"), Path(home())
    for path, mode in ((Path("/run/sshd"), 0o755), (directory, 0o700), (user_home / ".ssh", 0o700)):
        path.mkdir(mode=mode)
    (user_home / ".ssh" / "authorized_keys").write_text(public_key)
    (user_home / ".bashrc").write_text(profile)
    # A locked root account may not log in; this host's is not.
    (directory / "shadow").write_text("root:*:19000:0:99999:7:::\nsshd:*:19000:0:99999:7:::\n")
    run("mount", "--bind", str(directory / "shadow"), "/etc/shadow")
    while subprocess.run(["ip", "link", "show", "eth0"], capture_output=True, check=False).returncode:
        time.sleep(0.02)
    for command in (
        f"address add {address}/24 dev eth0", "link set eth0 up", "link set lo up", f"route add default via {SWITCH}",
    ):  # fmt: skip
        run("ip", *command.split())
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / "host_key"))
    (directory / "config").write_text(SSH_SERVER.format(home=user_home, directory=directory))
    server = find("sshd")
    assert server is not None
    subprocess.Popen([server, "-D", "-e", "-f", str(directory / "config")])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    while True:
        try:
            os.wait()
        except ChildProcessError:
            time.sleep(0.1)


if __name__ == "__main__":
    be_host(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:])
