"""A PATH of fake commands for scripts that ask the system for something: nothing is installed."""

import shutil
import subprocess
from pathlib import Path


class Machine:
    """A PATH of fake commands; its apt-get writes down what it was asked and brings what it was told to bring."""

    def __init__(self, folder: Path, commands: tuple[str, ...], user: int = 0) -> None:
        self.folder, self.asked = folder / "bin", folder / "asked"
        self.folder.mkdir()
        self.fake("id", f"echo {user}")
        self.apt_get()
        for name in commands:
            self.fake(name)

    def fake(self, name: str, does: str = "exit 0") -> None:
        path = self.folder / name
        path.write_text(f"#!{shutil.which('bash')}\n{does}\n")
        path.chmod(0o755)

    def real(self, *names: str) -> None:
        for name in names:
            (self.folder / name).symlink_to(str(shutil.which(name)))

    def apt_get(self, brings: str | None = None, fails_at: str | None = None) -> None:
        """The package manager: an install makes the command `brings`, and the action `fails_at` fails."""
        made = (
            f"[ $1 != install ] || {{ : > {self.folder}/{brings}; {shutil.which('chmod')} +x {self.folder}/{brings}; }}"
        )
        fails = f"[ $1 != {fails_at} ] || exit 100"
        self.fake("apt-get", f'echo "$@" >> {self.asked}\n{fails}\n{made if brings else ""}\nexit 0')

    def installed(self) -> list[str]:
        """The packages that were asked for, an entry for each call that installs."""
        calls = self.asked.read_text().splitlines() if self.asked.exists() else []
        words = [[word for word in call.split()[1:] if not word.startswith("-")] for call in calls if "install" in call]
        return [" ".join(names) for names in words]

    def run(self, script: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [str(shutil.which("bash")), str(script), *arguments]
        environment = {"PATH": str(self.folder), **variables}
        return subprocess.run(command, env=environment, capture_output=True, text=True)
