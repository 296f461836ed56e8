"""A real Slurm for the tests: the controller here, every node in name spaces of its own on this host."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path

SITES = ["standard-g", "boost_usr_prod", "acc", "gpu", "common", "qgpu", "normal-a100-40", "booster", "berzelius"]
SLURM = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scancel", "scontrol", "sinfo")
COMMANDS = (*SLURM, "ip", "nsenter", "unshare", "pkill")

CONF = """
ClusterName=test
SlurmctldHost={host}({net}.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1,batch_sched_delay=0
SlurmdParameters=config_overrides
SlurmdTimeout=5
MessageTimeout=2
BatchStartTimeout=10
KillWait=5
ReturnToService=1
JobRequeue=1
GresTypes=gpu
NodeName=node[01-05] NodeAddr={net}.[11-15] CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 \
RealMemory=4000 State=UNKNOWN
NodeName=big[1-2] NodeAddr={net}.[21-22] CPUs=288 Boards=1 SocketsPerBoard=1 CoresPerSocket=288 ThreadsPerCore=1 \
RealMemory=4000 Gres=gpu:8 Feature=thin State=UNKNOWN
PartitionName=main Nodes=node[01-05] Default=YES MaxTime=INFINITE DefaultTime=10 State=UP
PartitionName=DEFAULT Nodes=big[1-2] MaxTime=3-00:00:00 State=UP
"""


def missing() -> str | None:
    """Why no cluster can be started here; None where one can."""
    if os.geteuid() != 0:
        return "root is needed for nodes of their own"
    lacking = [command for command in COMMANDS if not shutil.which(command)]
    if lacking:
        return f"{', '.join(lacking)} is not installed; scripts/slurm-packages installs it on Debian"
    return None


class Cluster:
    """Five small nodes (node01–05) that run jobs and two large ones (big1–2) for scripts that are only checked."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munge refuses a socket that not everybody reaches
        self.tag = f"{os.getpid() % 100_000}"
        self.net = f"10.{64 + os.getpid() // 250 % 64}.{os.getpid() % 250}"
        self.nodes = {f"node0{n}": 10 + n for n in range(1, 6)} | {f"big{n}": 20 + n for n in (1, 2)}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Up to all nodes being idle."""
        for name in ("munge", "state", "run", "log", "spool", "dev"):
            (self.folder / name).mkdir()
        (self.folder / "munge").chmod(0o711)
        self._write()
        self._network()
        os.environ["SLURM_CONF"] = str(self.folder / "slurm.conf")
        munge = self.folder / "munge"
        places = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
        self._spawn("munged", ["munged", "--foreground", f"--socket={munge}/sock", *places])
        self._until(lambda: (munge / "sock").exists(), "munged")
        self.start_controller()
        for name in self.nodes:
            self.boot(name)
        self._until(lambda: idle() == len(self.nodes), "all nodes")

    def start_controller(self) -> None:
        """Start slurmctld, which goes on with what it had saved of itself."""
        self._spawn("slurmctld", ["slurmctld", "-D", "-f", f"{self.folder}/slurm.conf"])
        self._until(lambda: "UP" in told("scontrol", "ping"), "slurmctld")

    def saved_jobs(self) -> bytes:
        """What a slurmctld that dies now leaves to the next one: it saves some seconds after anything changed."""
        with contextlib.suppress(FileNotFoundError):  # it is being replaced
            return (self.folder / "state/job_state").read_bytes()
        return b""

    def kill_controller(self) -> None:
        """Let slurmctld die without a word; jobs run on."""
        process = self.processes.pop("slurmctld")
        process.kill()
        process.wait()

    def boot(self, node: str) -> None:
        """Switch a node on."""
        # A shell is the first process of the node, to collect what jobs leave behind.
        inside = (
            f"hostname {node}; for f in hosts nsswitch.conf; do mount --bind {self.folder}/$f /etc/$f; done; "
            f"slurmd -D -f {self.folder}/slurm.conf -N {node} & p=$!; "
            "trap 'kill -TERM $p' TERM; wait $p; wait $p"
        )
        unshared = [
            "unshare",
            "--pid",
            "--mount",
            "--uts",
            "--fork",
            "--kill-child",
            "--mount-proc",
            "bash",
            "-c",
            inside,
        ]
        self._spawn(node, ["nsenter", f"--net=/run/netns/mw{self.tag}-{node}", *unshared])

    def crash(self, node: str) -> None:
        """Cut a node's power: everything on it is gone at once."""
        self.processes.pop(node).kill()

    def stop(self) -> None:
        """Nothing stays: no process, no network, no variable."""
        for name in [*self.nodes, "slurmctld", "munged"]:
            if (process := self.processes.get(name)) is None:
                continue
            if name in self.nodes:
                subprocess.run(["pkill", "-TERM", "-P", str(process.pid)], check=False)  # the shell inside
            else:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for node in self.nodes:
            subprocess.run(["ip", "netns", "del", f"mw{self.tag}-{node}"], check=False)
        subprocess.run(["ip", "link", "del", f"mwb{self.tag}"], check=False)
        os.environ.pop("SLURM_CONF", None)
        shutil.rmtree(self.folder)

    def _write(self) -> None:
        host = socket.gethostname().partition(".")[0]
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        text = CONF.format(host=host, net=self.net, port=port, folder=self.folder)
        text += "".join(f"PartitionName={name}\n" for name in SITES)
        (self.folder / "slurm.conf").write_text(text)
        for number in range(8):
            os.mknod(self.folder / f"dev/gpu{number}", 0o20666, os.makedev(1, 3))
        (self.folder / "gres.conf").write_text(f"NodeName=big[1-2] Name=gpu File={self.folder}/dev/gpu[0-7]\n")
        (self.folder / "munge/key").write_bytes(os.urandom(1024))
        (self.folder / "munge/key").chmod(0o600)
        hosts = [("127.0.0.1", "localhost"), (f"{self.net}.1", host)]
        hosts += [(f"{self.net}.{last}", node) for node, last in self.nodes.items()]
        (self.folder / "nsswitch.conf").write_text(
            "hosts: files\npasswd: files\ngroup: files\n"
        )  # no name server there
        (self.folder / "hosts").write_text("".join(f"{address} {name}\n" for address, name in hosts))

    def _network(self) -> None:
        bridge = f"mwb{self.tag}"
        lines = [f"link add {bridge} type bridge", f"addr add {self.net}.1/24 dev {bridge}", f"link set {bridge} up"]
        for number, (node, last) in enumerate(self.nodes.items()):
            space, outer = f"mw{self.tag}-{node}", f"mw{self.tag}v{number}"
            lines += [
                f"netns add {space}",
                f"link add {outer} type veth peer name eth0 netns {space}",
                f"link set {outer} master {bridge} up",
                f"-n {space} addr add {self.net}.{last}/24 dev eth0",
                f"-n {space} link set eth0 up",
                f"-n {space} link set lo up",
            ]
        for line in lines:
            subprocess.run(["ip", *line.split()], check=True)

    def _spawn(self, name: str, command: list[str]) -> None:
        with (self.folder / f"log/{name}.start").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _until(self, condition, what: str) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline or any(process.poll() for process in self.processes.values()):
                logs = [f"{path.name}: {path.read_text()[-800:]}" for path in sorted((self.folder / "log").iterdir())]
                raise RuntimeError(f"{what} did not start\n" + "\n".join(logs))
            time.sleep(0.05)


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def idle() -> int:
    return sum(int(line) for line in told("sinfo", "-h", "-t", "idle", "-p", "main,booster", "-o", "%D").split())
