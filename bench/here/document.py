"""The file of a comparison: what is in it, its digest, and its signature.

A file is JSON with an indent of 1. Its last member, ``sha256``, is the SHA-256 of all others, as
``json.dumps(others, sort_keys=True, separators=(",", ":"), ensure_ascii=False)`` in UTF-8. That
shows damage and edits by accident; who wants to deceive can compute it anew. A signature by
``ssh-keygen`` beside the file shows whose key signed it.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from cellfeed import ParameterError

FORMAT = "cellfeed-comparison/1"
NAMESPACE = "cellfeed-comparison"  # what a signature is for
_SIGNER = "signer"
_ROOT = Path(__file__).parents[2]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Nothing has a default: what is unknown is null, and never absent."""


class Estimate(_Record):
    """A median; its interval is the smallest and largest of fewer than five rounds.

    Of five or more, it is the 95 % interval of the bootstrap.
    """

    value: float
    low: float
    high: float
    n_rounds: int


class Measurement(_Record):
    """One round of one entry: cells in seconds, and the state in which it began.

    ``page_cache`` says how the pages of its files were dropped, ``resident`` the share of their
    bytes that was still in the page cache (null: the kernel does not say), and ``busy`` the share
    of the processors that was busy in the 0.2 s before.
    """

    round: int
    cells: float
    seconds: float
    cells_per_s: float
    first_minibatch_seconds: float | None
    bytes_moved: float | None
    page_cache: str
    resident: float | None
    busy: float


class Entry(_Record):
    """A loader with its settings, or a limit of the machine.

    ``checked``: all cells that it delivered in an untimed round were compared with the files.
    ``failed``: why it was not measured, or not to the end. ``speedup``: cellfeed's speed divided by
    its own, of the entry ``compared_with``, within rounds; ``of_limit``: its speed divided by that
    of the entry ``limit``.
    """

    name: str
    peer: str
    section: str
    storage: str
    output: str
    environment: str | None
    settings: dict[str, Any]
    batch_size: int
    checked: bool
    failed: str | None
    packages: dict[str, str]
    peak_bytes: int | None
    cells_per_s: Estimate | None
    first_minibatch_s: Estimate | None
    compared_with: str | None
    speedup: Estimate | None
    limit: str | None
    of_limit: Estimate | None
    rounds: list[Measurement]


class ConversionRun(_Record):
    """What making a store took, once."""

    seconds: float
    peak_bytes: int | None
    disk_bytes: int


class Conversion(_Record):
    """A store that some entries read, and each time that it was made."""

    title: str
    storage: str
    failed: str | None
    runs: list[ConversionRun]


class Environment(_Record):
    """The Python that ran some entries, and every package in it; null is cellfeed's own."""

    name: str | None
    python: str | None
    packages: dict[str, str]
    failed: str | None


class Processor(_Record):
    """Its name, its threads, how many of them this process may run on, and a quota in cores."""

    model: str | None
    architecture: str
    logical_cores: int
    usable_cores: float
    cgroup_quota_cores: float | None


class Memory(_Record):
    """In bytes; ``cgroup_left_bytes`` is what the control groups still grant, null if no limit."""

    total_bytes: int
    available_bytes: int
    swap_bytes: int
    cgroup_left_bytes: int | None


class Disk(_Record):
    """Where the cells are. ``device`` is null on a network, whose names are nobody's business."""

    file_system: str | None
    kind: str | None
    device: str | None
    model: str | None
    rotates: bool | None
    total_bytes: int
    free_bytes: int


class Machine(_Record):
    """What runs the loaders."""

    processor: Processor
    memory: Memory
    disk: Disk
    system: str | None
    kernel: str


class Code(_Record):
    """The commit of this checkout; ``changed`` files, and a digest of the changes, if any.

    ``measuring`` is the digest of the code that times loaders and summarises rounds.
    """

    commit: str | None
    dirty: bool | None
    changed: list[str]
    changes_sha256: str | None
    measuring: str


class Cells(_Record):
    """The collection; ``sha256`` is of each cell's number of non-zeros and sum of counts."""

    n_cells: int
    n_genes: int
    n_nonzero: int
    n_files: int
    n_bytes: int
    label: str
    synthetic: bool
    sha256: str


class Settings(_Record):
    """What was asked for; ``left_out`` are entries of the whole comparison that were not."""

    profile: str
    rounds: int
    seconds: float
    seed: int
    timeout_seconds: float
    entries: list[str]
    left_out: list[str]


class Comparison(_Record):
    """Everything about one comparison."""

    format: str
    complete: bool
    command: str
    started: str
    updated: str
    interruptions: int
    settings: Settings
    code: Code
    machine: Machine
    cells: Cells
    environments: list[Environment]
    conversions: list[Conversion]
    entries: list[Entry]


def write(path: Path, comparison: Comparison) -> None:
    """Write a comparison with its digest, at once or not at all."""
    plain = _anonymous(msgspec.to_builtins(comparison))
    new = path.with_name(f".{path.name}.new")
    new.write_text(_rendered(plain | {"sha256": digest(plain)}), encoding="utf-8")
    new.replace(path)


def read(path: Path) -> Comparison:
    """Return an intact comparison.

    Raises
    ------
    ParameterError
        It is damaged, was edited, or is no such file.
    """
    try:
        text = path.read_bytes().decode()
        plain = json.loads(text)
        claimed = plain.pop("sha256")
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError) as error:
        raise ParameterError(f"`{path}` is no comparison, or damaged; ask for it again") from error
    if digest(plain) != claimed:
        msg = "the digest is not that of the content: it was edited or damaged; ask for it again"
        raise ParameterError(f"`{path}`: {msg}")
    if _rendered(plain | {"sha256": claimed}) != text:
        msg = "the content is that of the digest, but spaces or line ends were changed"
        raise ParameterError(f"`{path}`: {msg}; ask for the file as it was written")
    try:
        comparison = msgspec.convert(plain, Comparison)
    except msgspec.ValidationError as error:
        raise ParameterError(f"`{path}` is not as {FORMAT} has to be: {error}") from error
    if comparison.format != FORMAT:
        raise ParameterError(f"`{path}` is of format {comparison.format}, but {FORMAT} is needed")
    return comparison


def digest(plain: dict[str, Any]) -> str:
    """Return the SHA-256 of canonical JSON, as 64 hexadecimal digits."""
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _rendered(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _anonymous(value: Any) -> Any:
    """Return a value whose texts name neither this checkout nor a home folder, in valid UTF-8."""
    if isinstance(value, str):
        for folder, short in ((str(_ROOT), "."), (str(Path.home()), "~")):
            value = value.replace(folder, short) if len(folder) > 1 else value
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {key: _anonymous(each) for key, each in value.items()}
    return [_anonymous(each) for each in value] if isinstance(value, list) else value


def signature_of(path: Path) -> Path:
    """Return where the signature of a file is."""
    return path.with_name(f"{path.name}.sig")


def require_signing(key: Path) -> None:
    """Raise `ParameterError` if files cannot be signed by a key of ssh."""
    if shutil.which("ssh-keygen") is None:
        raise ParameterError("ssh-keygen is needed to sign, but not installed; install OpenSSH")
    if not key.is_file():
        raise ParameterError(f"`--sign-key` must be a private key of ssh, but `{key}` is no file")


def sign(path: Path, key: Path) -> Path:
    """Write the signature of a file by a private key of ssh, and return where.

    Raises
    ------
    ParameterError
        The key cannot be used.
    """
    require_signing(key)
    signature_of(path).unlink(missing_ok=True)  # or ssh-keygen would ask
    _ssh_keygen("-Y", "sign", "-f", key, "-n", NAMESPACE, path, what=f"`{key}` cannot sign")
    return signature_of(path)


def check_signature(path: Path, keys: Path | None) -> str:
    """Return what ``ssh-keygen`` says of a good signature of a file.

    Parameters
    ----------
    path
        The file; its signature is beside it.
    keys
        Public keys, one in each line, as ``https://github.com/USER.keys`` has them; the signature
        must be of one of these. If None, of any key.

    Raises
    ------
    ParameterError
        There is no good signature.
    """
    what = f"`{signature_of(path)}` is no good signature of `{path.name}`"
    if not signature_of(path).is_file():
        raise ParameterError(f"there is no signature `{signature_of(path)}`")
    signature = ("-n", NAMESPACE, "-s", signature_of(path))
    if keys is None:
        return _ssh_keygen("-Y", "check-novalidate", *signature, what=what, of=path)
    lines = [line for line in keys.read_text().splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        allowed = Path(folder) / "allowed_signers"
        allowed.write_text("".join(f"{_SIGNER} {line}\n" for line in lines))
        return _ssh_keygen(
            "-Y", "verify", "-f", allowed, "-I", _SIGNER, *signature,
            what=f"{what} by a key in `{keys}`", of=path,
        )  # fmt: skip


def _ssh_keygen(*arguments: Any, what: str, of: Path | None = None) -> str:
    """Run ssh-keygen, on the content of a file, and return what it prints."""
    try:
        ran = subprocess.run(
            ["ssh-keygen", *map(str, arguments)],
            input=None if of is None else of.read_bytes(),
            capture_output=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise ParameterError("ssh-keygen is needed, but not installed; install OpenSSH") from error
    if ran.returncode:
        said = " ".join((ran.stderr or ran.stdout).decode(errors="replace").split())
        raise ParameterError(f"{what}: {said}")
    return ran.stdout.decode(errors="replace").strip()
