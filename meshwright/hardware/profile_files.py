"""Where profiles are stored, which one is used for a device, and files of profiles that come from other machines."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from pydantic import ValidationError

from meshwright.atomic import write_atomic
from meshwright.errors import UserError
from meshwright.hardware.profile import CPU, FORMAT, Profile, file_name_of

FOLDER_VARIABLE = "MESHWRIGHT_PROFILES"
_GIVEN: ContextVar[Path | None] = ContextVar("profile given", default=None)
"""A file or folder of profiles that comes before all others."""


@dataclass(frozen=True)
class FoundProfile:
    """A profile and where it was found."""

    profile: Profile
    where: str
    """In words."""

    @property
    def words(self) -> str:
        """What was measured, when and with what, and where the profile is from."""
        one = self.profile
        with_what = [f"torch {one.torch}", f"driver {one.driver}" if one.driver else ""]
        with_what += ["" if one.on_cpu or not one.host_cpu else f"host {one.host_cpu}"]
        at = f" at {one.machine}" if one.machine else ""
        return f"measured on {one.date}{at} with {', '.join(filter(None, with_what))} ({self.where})"


def profiles_folder() -> Path:
    """Where this user's profiles are stored."""
    if named := os.environ.get(FOLDER_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "meshwright" / "profiles"


@contextmanager
def profiles_from(path: Path | None) -> Iterator[None]:
    """Within it, a profile given as a file, or those of a folder, are used before all others."""
    if path is not None:
        if path.is_file():
            _require_self_describing(read_profile(path), path)
        elif not path.is_dir():
            raise UserError(
                f"--profile = {path} does not exist; give a file of calibrate --export, or a folder of them"
            )
    before = _GIVEN.set(path)
    try:
        yield
    finally:
        _GIVEN.reset(before)


def find_profile(key: str, ranks: int = 1) -> FoundProfile | None:
    """The profile of a device: one that was given, else this user's, else one that comes with Meshwright, else None.

    Of a CPU preferably the one that as many ranks measured together, sharing its cores.
    """
    given = _GIVEN.get()
    if given is not None and given.is_file():
        profile = _read(given, given.stat().st_mtime_ns)
        if profile.gpu == key:
            return FoundProfile(profile, f"from {given}")
    elif given is not None and (path := _in_folder(given, key, ranks)) is not None:
        profile = _read(path, path.stat().st_mtime_ns)
        _require_self_describing(profile, path)
        _require_of(key, profile, str(path))
        return FoundProfile(profile, f"from {path}")
    if (path := _in_folder(profiles_folder(), key, ranks)) is not None:
        profile = _read(path, path.stat().st_mtime_ns)
        _require_of(key, profile, str(path))
        return FoundProfile(profile, f"from {path}")
    shipped = _shipped(f"{key}.json")
    return None if shipped is None else FoundProfile(shipped, "comes with Meshwright")


def profile_of(key: str, ranks: int = 1) -> Profile | None:
    """The profile that plans use for a device; None without one."""
    found = find_profile(key, ranks)
    return None if found is None else found.profile


def require_given_profile_of(key: str) -> None:
    """Refuse a profile that was given as a file and is of another device."""
    given = _GIVEN.get()
    if given is not None and given.is_file():
        _require_of(key, _read(given, given.stat().st_mtime_ns), f"--profile = {given}")


def read_profile(path: Path) -> Profile:
    """A profile from a file."""
    try:
        return _parsed(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the profile {path} cannot be read ({error}); give another, or remove it") from None


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = profile.model_dump(mode="json", exclude_none=True)
    lists = {name: value for name, value in fields.items() if isinstance(value, list) and value}
    plain = {name: value for name, value in fields.items() if not isinstance(value, list)}
    parts = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in plain.items()]
    for name, rows in lists.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        parts.append(f"  {json.dumps(name)}: [\n{lines}\n  ]")
    write_atomic(path, "{\n" + ",\n".join(parts) + "\n}\n")


def _in_folder(folder: Path, key: str, ranks: int) -> Path | None:
    names = [f"{key}.json"]
    if key == CPU:
        others = sorted(path.name for path in folder.glob(f"{CPU}-*-ranks.json"))
        names = [file_name_of(key, ranks), *names, *others]
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _require_of(key: str, profile: Profile, where: str) -> None:
    if profile.gpu != key:
        raise UserError(
            f"{where} is a profile of {profile.gpu}, but the cluster has {key}; give one that was measured on {key}"
        )


def _require_self_describing(profile: Profile, path: Path) -> None:
    if profile.format < FORMAT:
        raise UserError(
            f"the profile {path} has the old format {profile.format}, which does not say how it was measured; write it "
            "again with meshwright calibrate --export"
        )


@lru_cache(maxsize=8)
def _read(path: Path, changed_ns: int) -> Profile:
    return read_profile(path)


@lru_cache(maxsize=32)
def _shipped(name: str) -> Profile | None:
    path = files("meshwright.hardware").joinpath("profiles", name)
    return _parsed(path.read_text(encoding="utf-8"), str(path)) if path.is_file() else None


def _parsed(text: str, where: str) -> Profile:
    try:
        profile = Profile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise UserError(
            f"the profile {where} cannot be read by this version ({place}: {first['msg']}); "
            "measure again with meshwright calibrate, or remove it"
        ) from None
    if profile.format > FORMAT:
        raise UserError(
            f"the profile {where} has format {profile.format}, and this version reads up to {FORMAT}; use a newer "
            "Meshwright, or measure again with meshwright calibrate"
        )
    return profile
