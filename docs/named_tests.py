"""For mkdocs: a page with the source of every test that a page names, which `tests/FILE.py::test_name` then links to."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REFERENCE = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
PAGE = "named-tests.md"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    pages = [file.content_string for file in files.documentation_pages() if file.src_uri != PAGE]
    named = sorted({reference for page in pages for reference in REFERENCE.findall(page)})
    parts = ["# Tests that these pages name"]
    for path, name in named:
        parts.append(f'<span id="{_anchor(path, name)}"></span>\n`{path}`\n\n```python\n{_source(root / path, name)}\n```')
    files.append(File.generated(config, PAGE, content="\n\n".join(parts) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return REFERENCE.sub(lambda found: f"[{found[0]}]({PAGE}#{_anchor(*found.groups())})", markdown)


def _anchor(path: str, name: str) -> str:
    return f"{Path(path).stem}-{name}"


def _source(path: Path, name: str) -> str:
    """Of a test, decorators and all."""
    text = path.read_text()
    (test,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == name)
    first = min([test.lineno, *(decorator.lineno for decorator in test.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : test.end_lineno])
