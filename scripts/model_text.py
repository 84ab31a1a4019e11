# SPDX-License-Identifier: Apache-2.0
"""Text to train and test the project's own small model on: the documentation inside the Python standard library.

Every machine with Python holds it. Nothing is imported to get at it, so the text depends on the files alone; another
version of Python has other text.
"""

import ast
import hashlib
import inspect
import json
import math
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Document",
    "gather_documents",
    "held_out_sample",
    "load_documents",
    "order_zero_entropy",
    "render_module",
    "save_documents",
    "split_documents",
    "without_paragraphs",
]

# Packages without documentation for users, or with little but data.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "test", "tests", "idle_test", "config-3.11-x86_64-linux-gnu"}
TEXT_FILES = ("email/architecture.rst", "idlelib/README.txt", "idlelib/NEWS.txt", "idlelib/HISTORY.txt")

HELD_OUT_PERCENT = 7
HELD_OUT_BYTES_MAX = 100_000
HELD_OUT_DOCUMENT_BYTES = (6 * 1024, 12 * 1024)
PARAGRAPH_LENGTH_MIN = 60


@dataclass(frozen=True, kw_only=True)
class Document:
    """One module's documentation, or one topic of the language reference."""

    name: str
    text: str


def _documented(
    body: Iterable[ast.stmt],
) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield classes and functions in the order of the source, also those behind an ``if`` or ``try``."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _documented(node.body)
            yield from _documented(node.orelse)


def _signature(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if isinstance(node, ast.ClassDef):
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return f"class {node.name}({bases})" if bases else f"class {node.name}"
    return f"{node.name}({ast.unparse(node.args)})"


def _render(body: Iterable[ast.stmt], indent: str, seen: set[str]) -> list[str]:
    lines: list[str] = []
    for node in _documented(body):
        docstring = inspect.cleandoc(ast.get_docstring(node, clean=False) or "")
        inner = _render(node.body, indent + "    ", seen) if isinstance(node, ast.ClassDef) else []
        # The same docstring in several classes would be learned by heart, or leak into the held-out text.
        if docstring in seen:
            docstring = ""
        if not docstring and not inner:
            continue
        seen.add(docstring)
        lines.append(indent + _signature(node))
        lines.extend(f"{indent}    {line}".rstrip() for line in docstring.splitlines())
        lines.extend(["", *inner] if inner else [""])
    return lines


def render_module(source: str, name: str, seen: set[str]) -> str:
    """Return the docstrings of a module's ``source`` as pydoc would lay them out; empty where there are none.

    ``seen`` holds the docstrings that are left out because they came up before; it grows.
    """
    tree = ast.parse(source)
    docstring = inspect.cleandoc(ast.get_docstring(tree, clean=False) or "")
    lines = _render(tree.body, "", seen)
    if docstring in seen:
        docstring = ""
    seen.add(docstring)
    if not docstring and not lines:
        return ""
    return "\n".join([f"Help on module {name}:", "", *docstring.splitlines(), "", *lines]).rstrip() + "\n"


def _topics(source: str) -> dict[str, str]:
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(node.value)
            return topics
    raise ValueError("pydoc_data/topics.py holds no dictionary of topics: this Python's layout is not known")


def gather_documents(root: Path | None = None) -> list[Document]:
    """Return the documentation found under ``root``, the standard library's folder, sorted by name.

    Nothing is imported, so the result depends on the files alone.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    documents: list[Document] = []
    seen = {""}
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).parts):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS.intersection(relative.parts) or relative.parts[0] == "pydoc_data":
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        try:
            text = render_module(path.read_text(encoding="utf-8"), module, seen)
        except (SyntaxError, UnicodeDecodeError):
            continue  # lib2to3 keeps broken sources for its own tests
        if text:
            documents.append(Document(name=relative.as_posix(), text=text))
    topics = root / "pydoc_data" / "topics.py"
    if topics.exists():
        for topic, text in sorted(_topics(topics.read_text(encoding="utf-8")).items()):
            if text not in seen:
                seen.add(text)
                documents.append(Document(name=f"topics/{topic}", text=text.strip() + "\n"))
    for name in TEXT_FILES:
        if (root / name).exists():
            documents.append(Document(name=name, text=(root / name).read_text(encoding="utf-8", errors="replace")))
    return sorted(documents, key=lambda document: document.name)


def split_documents(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Split ``documents`` into (train, held out) by the hash of each name, so that a new file moves no other."""
    train_part: list[Document] = []
    held_out: list[Document] = []
    for document in documents:
        digest = hashlib.sha256(document.name.encode()).digest()
        (held_out if digest[0] * 100 // 256 < HELD_OUT_PERCENT else train_part).append(document)
    return train_part, held_out


def held_out_sample(held_out: Sequence[Document]) -> list[Document]:
    """Return the long documents among ``held_out``, each cut to 12 KiB, as many as fit into 100 KB."""
    shortest, longest = HELD_OUT_DOCUMENT_BYTES
    sample: list[Document] = []
    room = HELD_OUT_BYTES_MAX
    for document in sorted(held_out, key=lambda document: hashlib.sha256(document.name.encode()).digest()):
        data = document.text.encode()[:longest]
        if shortest <= len(data) <= room:
            sample.append(Document(name=document.name, text=data.decode(errors="ignore")))
            room -= len(data)
    return sample


def without_paragraphs(documents: Sequence[Document], held_out: Sequence[Document]) -> list[Document]:
    """Return ``documents`` less every paragraph that ``held_out`` has too, or that came up before.

    Topics of the language reference overlap: without this, held-out text would partly have been trained on.
    """
    seen = {part.strip() for document in held_out for part in document.text.split("\n\n")}
    kept: list[Document] = []
    for document in documents:
        parts: list[str] = []
        for part in document.text.split("\n\n"):
            # Short ones are headings and one-line docstrings: repeating them is what such text is like.
            if len(part) < PARAGRAPH_LENGTH_MIN or part.strip() not in seen:
                parts.append(part)
                seen.add(part.strip())
        kept.append(Document(name=document.name, text="\n\n".join(parts)))
    return kept


def order_zero_entropy(documents: Sequence[Document]) -> float:
    """Return the entropy, in bits, of one byte drawn from ``documents`` without looking at its neighbours."""
    counts = Counter(b"".join(document.text.encode() for document in documents))
    total = counts.total()
    return -sum(count / total * math.log2(count / total) for count in counts.values())


def save_documents(documents: Sequence[Document], path: Path) -> None:
    """Write ``documents`` to ``path``, one JSON object with ``name`` and ``text`` on each line."""
    lines = [json.dumps({"name": document.name, "text": document.text}) for document in documents]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def load_documents(path: Path) -> list[Document]:
    """Return the documents that save_documents() wrote to ``path``."""
    return [Document(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
