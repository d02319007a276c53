"""Put the stand-in repository, and the stand-in for loading a module, onto test nodes.

    python tests/aptrepo/onto_node.py OUT NODE...

OUT is what build.py wrote, NODE the name of a container of playbooks/nodes/create.yml. Afterwards the node serves the
repository to itself at http://127.0.0.1:8099/ and `systemctl reboot` "loads" what DKMS has installed (node/).
"""

from __future__ import annotations

import argparse
import io
import subprocess
import tarfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
URL = "http://127.0.0.1:8099"
FILES = {
    "simulated-nvidia": ("usr/local/sbin", 0o755),
    "simulated-nvidia.service": ("etc/systemd/system", 0o644),
    "aptrepo.service": ("etc/systemd/system", 0o644),
}


def install(repository: Path, node: str) -> None:
    """Copy everything to one node and start it. Raises CalledProcessError when the node does not take it."""

    def root_owned(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        return info

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(repository, "srv/aptrepo", filter=root_owned)
        for name, (folder, mode) in FILES.items():
            info = tarfile.TarInfo(f"{folder}/{name}")
            content = (HERE / "node" / name).read_bytes()
            info.size, info.mode = len(content), mode
            archive.addfile(info, io.BytesIO(content))
    command = ["podman", "exec", "--interactive", node]
    unpack = ["sh", "-c", "rm -rf /srv/aptrepo && tar -C / -xf -"]
    subprocess.run([*command, *unpack], input=buffer.getvalue(), check=True)
    units = [name for name in FILES if name.endswith(".service")]
    for arguments in (["daemon-reload"], ["--quiet", "enable", *units], ["restart", *units]):
        subprocess.run(["podman", "exec", node, "systemctl", *arguments], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("repository", type=Path, metavar="OUT")
    parser.add_argument("nodes", nargs="+", metavar="NODE")
    arguments = parser.parse_args()
    for node in arguments.nodes:
        install(arguments.repository, node)


if __name__ == "__main__":
    main()
