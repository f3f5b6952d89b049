"""The optional compiled kernels. All other settings are in pyproject.toml.

Without a compiler the build goes on without them: the package then computes in torch. EQUILIBRIA_NATIVE=0 leaves them out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("equilibria/native")
FLAGS = ["-std=c++17", "-O2", "-ftree-vectorize", "-Wno-psabi", "-fvisibility=hidden"]
WINDOWS_FLAGS = ["/std:c++17", "/O2", "/EHsc"]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-O1", "-g", "-DEQUILIBRIA_ONE_TARGET"]


class BuildKernels(build_ext):
    """Compile with the flags of the compiler found."""

    def build_extensions(self) -> None:
        flags = WINDOWS_FLAGS if self.compiler.compiler_type == "msvc" else FLAGS
        sanitize = SANITIZERS if os.environ.get("EQUILIBRIA_SANITIZE") == "1" else []
        for extension in self.extensions:
            extension.extra_compile_args = [*flags, *sanitize]
            extension.extra_link_args = [*sanitize[:1], *(["-pthread"] if sys.platform.startswith("linux") else [])]
        super().build_extensions()


KERNELS = Extension(
    "equilibria.native._kernels",
    sources=[str(SOURCES / "kernels.cpp")],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    define_macros=[("Py_LIMITED_API", "0x030B0000")],
    py_limited_api=True,
    optional=True,
)
WANTED = os.environ.get("EQUILIBRIA_NATIVE", "1") != "0"

setup(
    ext_modules=[KERNELS] if WANTED else [],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if WANTED else {},
)
