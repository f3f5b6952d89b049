"""For mkdocs: the reports in results/, beside docs/, as pages of the site."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

BY_HAND = "NOTES.md"  # the overview ends with it


def on_files(files: Files, config: MkDocsConfig) -> Files:
    folder = Path(config.config_file_path).parent / "results"
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".png") and path.name != BY_HAND:
            name = path.relative_to(folder.parent).as_posix()
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files
