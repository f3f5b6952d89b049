"""What is released: an archive and a wheel, built here, and the wheel used from an environment of its own."""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import equilibria as eq

ROOT = Path(__file__).parent.parent
BUILT = ("equilibria", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")  # what the build reads


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the results of `python -m build`, outside the repository, in which it would leave files."""
    pytest.importorskip("build")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    copy(source)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), where=source)
    return folder


def run(*command: str, where: Path) -> str:
    # the package of the working tree must not come before the installed one
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def sources(*names: str) -> list[str]:
    """Return the files of the repository, including uncommitted ones."""
    found = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *names, where=ROOT).splitlines()
    return [name for name in found if (ROOT / name).is_file()]


def copy(to: Path) -> None:
    """Copy what the build reads."""
    for name in sources(*BUILT):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        (to / name).write_bytes((ROOT / name).read_bytes())


def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_the_wheel_holds_every_module_types_and_licence(dist: Path) -> None:
    names = zipfile.ZipFile(wheel(dist)).namelist()
    modules = {name for name in names if name.endswith(".py")}
    assert modules == {name for name in sources("equilibria") if name.endswith(".py")}
    assert "equilibria/py.typed" in names and any(name.endswith("LICENSE") for name in names)
    assert not any(name.startswith(("tests", "benchmarks", "results", "docs")) for name in names)


def test_the_archive_can_be_built_again(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    names = {name.partition("/")[2] for name in tarfile.open(archive).getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "equilibria/__init__.py", "equilibria/py.typed"} <= names
    assert {name for name in sources("equilibria/native") if name.endswith((".h", ".cpp"))} <= names


def test_version_and_requirements_are_declared(dist: Path) -> None:
    with zipfile.ZipFile(wheel(dist)) as contents:
        (name,) = (name for name in contents.namelist() if name.endswith(".dist-info/METADATA"))
        told = email.message_from_bytes(contents.read(name))
    assert told["Version"] == eq.__version__ and told["License-Expression"] == "MIT"
    plain = [need for need in told.get_all("Requires-Dist", []) if "extra ==" not in need]
    assert [re.split(r"[<>=~! ]", need)[0] for need in plain] == ["torch"]


def installed(what: Path, where: Path, *options: str) -> tuple[Path, str]:
    """Install into a new environment with the other packages of this one; return its folder, and what pip printed."""
    home = where / "env"
    venv.create(home, with_pip=False, symlinks=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    pip = (sys.executable, "-m", "pip", "--python", str(home / "bin" / "python"), "install", "-q")
    return home, run(*pip, "--disable-pip-version-check", "--no-deps", "--no-index", *options, str(what), where=where)


SOLVE = (
    "import torch, equilibria as eq\n"
    "z = eq.DEQ(lambda z, x: torch.cos(z) + x)(torch.zeros(2, 3))\n"
    "assert torch.allclose(z, torch.tensor(0.7391), atol=1e-3)\n"
    "print(eq.__file__)"
)


def test_the_wheel_works_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    """The packages it needs are those of this environment; the package itself is the wheel's, not the working tree's."""
    home, _ = installed(wheel(dist), tmp_path)
    found = Path(run(str(home / "bin" / "python"), "-c", SOLVE, where=tmp_path).strip())
    assert found.is_relative_to(home)
    assert "reproduce" in run(str(home / "bin" / "equilibria"), "--help", where=tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [True, False])
def test_an_installation_from_source_tells_whether_there_are_kernels(
    compiler: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler it says nothing and goes on without kernels."""
    false, real = shutil.which("false"), shutil.which("c++")
    if (false if not compiler else real) is None:
        pytest.skip("needs `false`, or a compiler named c++")
    if not compiler:
        monkeypatch.setenv("CC", str(false))
        monkeypatch.setenv("CXX", str(false))
    monkeypatch.setenv("EQUILIBRIA_NATIVE", "1")
    source = tmp_path / "source"
    copy(source)
    home, told = installed(source, tmp_path, "--no-build-isolation")
    assert told == ""
    info = json.loads(run(str(home / "bin" / "equilibria"), "info", "--json", where=tmp_path))
    assert info["native"] is compiler
    assert info["reason"].startswith("" if compiler else "The compiled kernels are not built")
    assert Path(run(str(home / "bin" / "python"), "-c", SOLVE, where=tmp_path).strip()).is_relative_to(home)


def test_the_changelog_has_an_entry_for_this_version() -> None:
    """The entry has the date of the citation, and unreleased changes are above it."""
    text, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    dated = re.search(rf"^## \[{re.escape(eq.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    assert dated is not None and text.index("## [Unreleased]") < dated.start()
    assert f"version: {eq.__version__}\n" in citation and f"date-released: {dated[1]}\n" in citation
