"""Writes the file tree of README.md: every tracked file, with the first line of what it says it is.

python docs/make_tree.py            # rewrite the tree in README.md
python docs/make_tree.py --check    # exit 1 when it is out of date
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
START, END = "<!-- tree -->", "<!-- end of tree -->"
FOLDERS = ("models", "index", "service", "bench", "docs", "tests", "typings", ".ci")
TOP = ("Makefile", "pyproject.toml", "CHANGELOG.md")
SKIPPED = re.compile(r"__pycache__|\.pyc$|^docs/images/|^typings/hivlp/|/results/|__init__\.py$")
SAID = {
    "Makefile": "every command of the project: `make help`",
    "pyproject.toml": "package, extras, entry points, tools",
    "CHANGELOG.md": "what changed",
    ".ci/run": "everything a new machine needs, then every check and test",
    "typings/": "three links for type checkers, which do not follow package-dir",
    "docs/openapi.json": "the API as a document; a test keeps it true",
    "service/web/index.html": "the search page",
    "service/web/docs.html": "the API's documentation page",
    "service/web/style.css": "its looks, light and dark",
    "service/web/app.js": "its behaviour",
    "service/web/drops.js": "pictures dragged onto the page",
    "service/web/rerank.js": "the re-rank switch",
    "service/web/timeline.js": "the drawing of how an answer was found",
    "service/web/docs.js": "draws the documentation from the API's document",
    "service/web/favicon.svg": "its sign",
}
WIDTH = 38


def main() -> int:
    """Write or check the tree."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    fresh = f"{before}{START}\n```\n{tree()}```\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(fresh != text)
    readme.write_text(fresh, encoding="utf-8")
    return 0


def tree() -> str:
    """The tree, a line a file."""
    lines = [_line(name, 0, SAID[name]) for name in TOP]
    for folder in FOLDERS:
        lines += _folder(ROOT / folder, 0)
    return "".join(lines)


def _folder(path: Path, depth: int) -> list[str]:
    relative = path.relative_to(ROOT).as_posix()
    lines = [_line(f"{path.name}/", depth, _says_folder(path, relative))]
    entries = sorted(path.iterdir(), key=lambda entry: (entry.is_dir(), entry.name))
    for entry in entries:
        name = entry.relative_to(ROOT).as_posix()
        if SKIPPED.search(name + ("/" if entry.is_dir() else "")):
            continue
        if entry.is_dir() and any(entry.rglob("*.*")):
            lines += _folder(entry, depth + 1)
        elif entry.is_file() and entry.name != "py.typed":
            lines.append(_line(entry.name, depth + 1, SAID.get(name) or _says(entry)))
    return lines


def _line(name: str, depth: int, said: str) -> str:
    return f"{'  ' * depth + name:<{WIDTH}} {said}".rstrip() + "\n"


def _says_folder(path: Path, relative: str) -> str:
    package = path / "__init__.py"
    return SAID.get(f"{relative}/") or (_says(package) if package.is_file() else "")


def _says(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        said = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0].replace("\n", " ")
    else:
        said = next((line.lstrip("# ") for line in text.splitlines() if line.strip("# ")), "")
    return re.split(r"(?<=[a-z`)])\. ", said.rstrip("."))[0]


if __name__ == "__main__":
    sys.exit(main())
