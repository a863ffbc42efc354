"""The comparison of a stranger's machine: one file with everything, which cannot change unseen."""

import importlib
import json
import re
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests import commands
from tests.bench.conftest import N_CELLS
from tests.warm import python as warm

from cellfeed import ParameterError

pytestmark = [pytest.mark.docs, pytest.mark.process]

document: Any = importlib.import_module("bench.here.document")
pages: Any = importlib.import_module("bench.here.page")
main: Any = importlib.import_module("bench.here.__main__").main
OURS = "cellfeed on .h5ad plates, block 16, fetch 256, CSR"
SLICES = "slices by h5py of .h5ad plates, block 16, fetch 256"
LIMIT = "decompress gzip of the plates, block 16, fetch 256"
DISK = "read .h5ad plates from end to end"
NOT_TO_BE_HAD = "annbatch, chunk 512, preload 32, CSR (defaults but for minibatches of 64)"
DAMAGED = "is no comparison, or damaged|digest is not|spaces or line ends"


@pytest.fixture(scope="module")
def measure():
    """What measures, with a short profile of what needs this environment, and of what has none.

    Jobs find imports done, and must not empty the page cache of the whole machine.
    """
    with pytest.MonkeyPatch.context() as patch:
        module: Any = importlib.import_module("bench.here.measure")
        short = module.Profile(
            cells=N_CELLS, rounds=2, seconds=0.1, timeout=600.0,
            names=(SLICES, LIMIT, DISK, NOT_TO_BE_HAD),
        )  # fmt: skip
        patch.setitem(module.PROFILES, "short", short)
        patch.setattr(module.processes, "DROP_CACHES", Path("/proc/nowhere"))
        forking = types.SimpleNamespace(**vars(subprocess) | {"Popen": warm.Popen})
        patch.setattr(module.processes, "subprocess", forking)
        patch.setattr("bench.here.machine.BUSY_SECONDS", 0.01)
        yield module


@pytest.fixture(scope="module")
def run(measure, collection):
    def run(output, *options):
        where = ["--environments", output / "none", "--python312", output / "no-python"]
        return commands.run(
            main, "run", "--collection", collection, "--output", output, *where, *options
        )

    return run


@pytest.fixture(scope="module")
def ended(run, tmp_path_factory):
    ended = run(tmp_path_factory.mktemp("output"))
    assert ended.exit_code == 0, ended.output
    return ended


@pytest.fixture(scope="module")
def path(ended):
    return Path(re.findall(r"^File: (.*)$", ended.stderr, re.MULTILINE)[0])


@pytest.fixture(scope="module")
def comparison(path):
    return document.read(path)


@pytest.fixture
def copy(path, tmp_path):
    return Path(shutil.copy(path, tmp_path))


def entry_of(comparison, name):
    (found,) = [each for each in comparison.entries if each.name == name]
    return found


def test_each_entry_is_measured_or_has_the_reason(comparison):
    assert comparison.complete
    assert {each.name for each in comparison.entries} == set(comparison.settings.entries)
    assert {OURS, SLICES, LIMIT, NOT_TO_BE_HAD} <= set(comparison.settings.entries)
    for name in (OURS, SLICES, LIMIT):
        entry = entry_of(comparison, name)
        assert entry.failed is None
        assert [each.round for each in entry.rounds] == [1, 2]
        assert entry.cells_per_s.low <= entry.cells_per_s.value <= entry.cells_per_s.high
        assert entry.cells_per_s.n_rounds == 2
        assert entry.checked == (name != LIMIT)
    failed = entry_of(comparison, NOT_TO_BE_HAD)
    assert failed.rounds == []
    assert "no-python" in failed.failed
    assert "3.12" in failed.failed
    (environment,) = [each for each in comparison.environments if each.name == "annbatch"]
    assert "3.12" in environment.failed
    # All other entries are listed.
    named = {*comparison.settings.entries, *comparison.settings.left_out}
    entries: Any = importlib.import_module("entries")
    assert named == {each.name for each in entries.all_entries()}


def test_speeds_and_ratios_are_those_of_the_rounds(comparison):
    ours, slices = entry_of(comparison, OURS), entry_of(comparison, SLICES)
    ratios = []
    for our, their in zip(ours.rounds, slices.rounds, strict=True):
        assert our.cells == N_CELLS
        assert our.cells_per_s == our.cells / our.seconds
        ratios.append(our.cells_per_s / their.cells_per_s)
    assert (slices.speedup.low, slices.speedup.high) == (min(ratios), max(ratios))
    assert slices.compared_with == OURS
    assert ours.limit in {LIMIT, DISK}
    assert ours.of_limit.n_rounds == 2


def test_says_what_it_ran_on(comparison, collection):
    machine, code, cells = comparison.machine, comparison.code, comparison.cells
    assert machine.processor.usable_cores <= machine.processor.logical_cores
    assert machine.memory.total_bytes > 1e8
    assert machine.disk.total_bytes >= machine.disk.free_bytes
    assert machine.kernel
    assert code.measuring == importlib.import_module("rounds").measuring_code()
    assert code.commit is None or re.fullmatch("[0-9a-f]{40}", code.commit)
    assert code.dirty == (bool(code.changed) if code.commit else None)
    own = next(each for each in comparison.environments if each.name is None)
    assert {"numpy", "torch", "h5py"} <= set(own.packages)
    assert cells.n_cells == N_CELLS
    assert cells.n_bytes == sum(each.stat().st_size for each in collection.glob("*.h5ad"))
    assert comparison.command.startswith("python -m bench.here")
    for each in (one for entry in comparison.entries for one in entry.rounds):
        assert each.page_cache.startswith("dropped by posix_fadvise")
        assert each.resident is None or 0 <= each.resident <= 1
        assert 0 <= each.busy <= 1


def members(value, at=()):
    """Return where the members of all records are; keys of free mappings are not."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield (*at, key)
            if key not in {"packages", "settings"} or "profile" in each:
                yield from members(each, (*at, key))
    if isinstance(value, list) and value:
        yield from members(value[0], (*at, 0))


def test_no_member_may_be_missing_or_unknown(path, tmp_path):
    plain = json.loads(path.read_text())
    del plain["sha256"]
    places = list(members(plain))
    assert len(places) > 60

    def written(changed):
        target = tmp_path / "changed.json"
        whole = changed | {"sha256": document.digest(changed)}
        target.write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")
        return target

    assert document.read(written(plain)).complete
    for place in places:
        for change in ("missing", "unknown"):
            changed = msgspec.json.decode(msgspec.json.encode(plain))
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            if change == "missing":
                del inner[place[-1]]
            else:
                inner["surprise"] = 1
            with pytest.raises(ParameterError, match="is not as cellfeed-comparison/1"):
                document.read(written(changed))


@given(data=st.data())
def test_any_changed_byte_is_found(path, tmp_path_factory, data):
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[at]))
    changed = tmp_path_factory.getbasetemp() / "changed-byte.json"
    changed.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
    with pytest.raises(ParameterError, match=DAMAGED):
        document.read(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("\n", "\r\n"),
        lambda text: text.replace("\n ", "\n\t"),
        lambda text: json.dumps(json.loads(text)),
        lambda text: text.replace('"complete": true', '"complete": false'),
        lambda _: "",
        lambda _: "[]",
        lambda _: "[" * 100_000,
    ],
)
def test_verify_refuses_what_was_changed(copy, change):
    copy.write_bytes(change(copy.read_text()).encode())
    ended = commands.run(main, "verify", copy)
    assert ended.exit_code == 2
    assert re.search(DAMAGED, ended.stderr)
    assert len(ended.stderr.splitlines()) == 1


def test_verify_accepts_what_was_not_and_the_page_is_made_of_it(copy, comparison):
    ended = commands.run(main, "verify", copy)
    assert ended.exit_code == 0
    assert ended.stdout.startswith(f"intact: {pages.title(comparison)}")
    assert ended.stdout.endswith("complete\nnot signed\n")
    ended = commands.run(main, "page", copy)
    assert ended.exit_code == 0
    assert Path(ended.stdout.strip()).read_text().startswith("<!doctype html>")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    folder = tmp_path_factory.mktemp("keys")
    for name in ("own", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", folder / name]
        subprocess.run(command, check=True)
    return folder


def test_a_signature_tells_whose_key_it_is_of_and_is_of_one_file(copy, keys, comparison):
    def verified(*options):
        ended = commands.run(main, "verify", copy, *options)
        assert (ended.exit_code == 0) == ('Good "cellfeed-comparison" signature' in ended.stdout)
        return ended.exit_code, ended.stderr

    status, said = verified("--keys", keys / "own.pub")
    assert status == 2
    assert "there is no signature" in said
    document.sign(copy, keys / "own")
    document.sign(copy, keys / "own")  # once more, without a question
    both = keys / "both"
    both.write_text((keys / "other.pub").read_text() + "\n" + (keys / "own.pub").read_text())
    for options in ((), ("--keys", keys / "own.pub"), ("--keys", both)):
        assert verified(*options)[0] == 0
    status, said = verified("--keys", keys / "other.pub")
    assert status == 2
    assert "is no good signature" in said
    document.write(copy, msgspec.structs.replace(comparison, started="earlier"))
    status, said = verified()
    assert status == 2
    assert "is no good signature" in said


def test_a_key_that_cannot_sign_is_told_before_hours_of_measuring(run, tmp_path):
    ended = run(tmp_path, "--sign-key", tmp_path / "nowhere")
    assert ended.exit_code == 2
    assert "must be a private key" in ended.stderr
    assert not list(tmp_path.glob("comparison-*"))


def test_interrupted_runs_lose_nothing_and_continue(measure, run, tmp_path, monkeypatch, keys):
    measured: list[tuple[str, int]] = []
    real = measure.Session._measure

    def interrupted(self, result, number):
        if len(measured) == 6:
            raise KeyboardInterrupt
        measured.append((result.entry.name, number))
        real(self, result, number)

    monkeypatch.setattr(measure.Session, "_measure", interrupted)
    ended = run(tmp_path, "--sign-key", keys / "own")
    assert ended.exit_code == 130
    assert "the same command continues" in ended.stderr.splitlines()[-1]
    (path,) = tmp_path.glob("comparison-*.json")
    before = document.read(path)
    assert not before.complete
    assert any(each.rounds for each in before.entries)
    assert "Interrupted: not all" in path.with_suffix(".html").read_text()
    assert commands.run(main, "verify", path, "--keys", keys / "own.pub").exit_code == 0

    monkeypatch.setattr(measure.Session, "_measure", real)
    assert run(tmp_path).exit_code == 0
    assert list(tmp_path.glob("comparison-*.json")) == [path]
    after = document.read(path)
    assert after.complete
    assert (after.started, after.interruptions) == (before.started, 1)
    for old in before.entries:
        assert entry_of(after, old.name).rounds[: len(old.rounds)] == old.rounds
        assert entry_of(after, old.name).peak_bytes == old.peak_bytes or old.peak_bytes is None
    assert len(entry_of(after, OURS).rounds) == 2


def test_another_request_is_another_file(measure, run, tmp_path, monkeypatch):
    def interrupted(self, result, number):
        raise KeyboardInterrupt

    monkeypatch.setattr(measure.Session, "_measure", interrupted)
    monkeypatch.setattr(measure.Session, "save", lambda self: None)
    new = []
    for options in ((), ("--seed", 1), ("--rounds", 3)):
        ended = run(tmp_path, *options)
        assert ended.exit_code == 130
        new.append("Continuing" in ended.stderr)
    assert new == [False] * 3


def test_a_peer_that_fails_in_a_round_keeps_its_other_rounds(measure, run, tmp_path, monkeypatch):
    real = measure.processes.run

    def run_job(command, *, log, **options):
        if log.name.startswith("slices") and log.stem.endswith("-2"):
            raise measure.FailedError("it <b>fell</b> over")
        return real(command, log=log, **options)

    monkeypatch.setattr(measure.processes, "run", run_job)
    ended = run(tmp_path)
    assert ended.exit_code == 0
    assert "it <b>fell</b> over" in ended.stdout
    (path,) = tmp_path.glob("comparison-*.json")
    failed = entry_of(document.read(path), SLICES)
    assert failed.failed == "it <b>fell</b> over"
    assert [each.round for each in failed.rounds] == [1]
    assert failed.speedup.n_rounds == 1
    shown = path.with_suffix(".html").read_text()
    assert "after 1 of 2 rounds" in shown
    assert "<b>fell" not in shown


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_is_that_of_the_checkout(tmp_path):
    code_of = importlib.import_module("bench.here.machine").code_of

    def git(*words):
        who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        ran = subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True)
        return ran.stdout.decode().strip()

    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "copy").mkdir()
    git("add", ".")
    git("commit", "--quiet", "--message=one")
    clean = code_of("", tmp_path)
    assert (clean.commit, clean.dirty, clean.changed) == (git("rev-parse", "HEAD"), False, [])
    (tmp_path / "code.py").write_text("2")
    (tmp_path / "new.py").write_text("3")
    changed = code_of("", tmp_path)
    assert (changed.dirty, changed.changed) == (True, ["code.py", "new.py"])
    assert changed.changes_sha256 not in {None, clean.changes_sha256}
    for elsewhere in (tmp_path / "copy", tmp_path / "nowhere"):
        assert code_of("", elsewhere).commit is None
        assert code_of("", elsewhere).dirty is None


def test_folders_of_the_user_are_left_out(comparison, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    said = f"`/home/somebody/python` of {Path(__file__).parents[2]}/.peers \udcff"
    document.write(tmp_path / "one.json", msgspec.structs.replace(comparison, command=said))
    assert document.read(tmp_path / "one.json").command == "`~/python` of ./.peers ?"


def test_the_page_has_all_and_loads_nothing(path, comparison, ended):
    shown = path.with_suffix(".html").read_text()
    said = re.sub(r"&#(\d+);", lambda code: chr(int(code[1])), shown)
    for each in comparison.entries:
        assert each.name in said
    for each in comparison.settings.left_out:
        assert each in said
    assert entry_of(comparison, NOT_TO_BE_HAD).failed in said.replace("&lt;", "<")
    assert json.loads(path.read_text())["sha256"] in shown
    assert comparison.machine.kernel in shown
    assert not re.search(r"(src|href)=|url\(|@import|<script", shown)
    assert SLICES in ended.stdout
    assert NOT_TO_BE_HAD in ended.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--peers", "nobody"], "but got nobody"),
        (["--peers", "machine"], "has no loader of `machine`"),
        (["--cells", "5000"], "leave it or --collection out"),
        (["--label", "nothing"], "must have the column `nothing`"),
    ],
)
def test_mistakes_are_told_in_one_line(run, tmp_path, options, message):
    ended = run(tmp_path, *options)
    assert ended.exit_code == 2
    assert message in ended.stderr.splitlines()[-1]


ROOT = Path(__file__).parents[2]


def test_its_page_names_options_that_exist():
    text = (ROOT / "docs/benchmarks/here.md").read_text()
    known = {
        option for command in main.commands.values() for each in command.params
        for option in each.opts
    }  # fmt: skip
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= known
    asked = re.findall(r"python -m bench\.here (\w+)", text)
    assert set(asked) == {"verify", "page"}
    makefile = (ROOT / "Makefile").read_text()
    recipe = "$(BIN)/python -m bench.here run $(COMPARE_OPTIONS)"
    assert re.search(rf"\ncompare-here: \$\(\w+\)\n\t{re.escape(recipe)}\n", makefile)
