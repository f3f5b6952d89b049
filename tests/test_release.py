"""What is released: an archive and a wheel, built here, and the wheel used from an environment of its own."""

from __future__ import annotations

import email
import re
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
    for name in sources(*BUILT):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source), where=source)
    return folder


def run(*command: str, where: Path) -> str:
    done = subprocess.run(command, cwd=where, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def sources(*names: str) -> list[str]:
    """Return the files of the repository, including uncommitted ones."""
    found = run("git", "ls-files", "--cached", "--others", "--exclude-standard", *names, where=ROOT).splitlines()
    return [name for name in found if (ROOT / name).is_file()]


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


def test_the_wheel_works_in_an_environment_of_its_own(dist: Path, tmp_path: Path) -> None:
    """The packages it needs are those of this environment; the package itself is the wheel's, not the working tree's."""
    home = tmp_path / "env"
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        str(wheel(dist)),
        where=tmp_path,
    )
    (site,) = home.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    program = (
        "import torch, equilibria as eq\n"
        "z = eq.DEQ(lambda z, x: torch.cos(z) + x)(torch.zeros(2, 3))\n"
        "assert torch.allclose(z, torch.tensor(0.7391), atol=1e-3)\n"
        "print(eq.__file__)"
    )
    assert Path(run(str(python), "-c", program, where=tmp_path).strip()).is_relative_to(site)
    assert "reproduce" in run(str(home / "bin" / "equilibria"), "--help", where=tmp_path)


def test_the_changelog_has_an_entry_for_this_version() -> None:
    """The entry has the date of the citation, and unreleased changes are above it."""
    text, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    dated = re.search(rf"^## \[{re.escape(eq.__version__)}\] - (\d{{4}}-\d\d-\d\d)$", text, re.MULTILINE)
    assert dated is not None and text.index("## [Unreleased]") < dated.start()
    assert f"version: {eq.__version__}\n" in citation and f"date-released: {dated[1]}\n" in citation
