"""The figures that the code base is held to: size, circles between files, prose, tests. `make figures` prints them.

    make figures                        this checkout, or AGAINST=../old: next to another one
    make figures LIST=fragments         what a figure counts: long, short, circles, upwards, fragments, ray, names,
                                        sentences

Counts of sentences are heuristics. A docstring is called a fragment where its first line begins with a word that
continues a sentence (Of, For, What, Whether, ...) or with a participle ("Decoded on ..."), or has under four words.
A test asserts a sentence where it compares with a text of five words or more, or matches one.

A private name of Ray is what is imported from a module, or reached through an attribute, whose name begins with an
underscore, or from a module that Ray does not document; a method of a class of Ray that a subclass overrides; a private
attribute of any other object in a file that imports Ray; and a lower-case RAY_ variable, which is
a setting of Ray's C++ code.
"""

import argparse
import ast
import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

GOALS = {
    "lines in raydali/ and jobs/": "<= 21,800",
    "files": "<= 185",
    "files under 30 lines, without __init__.py": "0",
    "files past 300 lines": "0",
    "import circles between files": "0",
    "imports upwards: between packages; in all": "0; 0",
    "lines of a job": "<= 190",
    "lines that two jobs have in common": "",
    "docstrings that are fragments": "0",
    "hard dependencies": "15",
    "private names of Ray": "<= 46",
    "tests with names of 60 characters or more": "0",
    "tests that assert a sentence": "< 3%",
}
CONTINUES = re.compile(
    r"(of|in|for|from|with|without|at|by|to|on|as|behind|between|beside|above|below|what|whose|who|whom|that|which|"
    r"where|when|how|why|whether|so|until|such|than|not|no|only|all|\w+ed (and|or|by|on|in|to|as|at|for|from|with"
    r"|without|once|into|of|out|behind))\b",
    re.IGNORECASE,
)

UNDOCUMENTED = ("ray.autoscaler.v2", "ray.core.generated", "ray.scripts")
VARIABLE = re.compile(r"RAY_[a-z][a-z_]+")


def figures() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Compute the figures of the checkout in the current directory, and what they count."""
    suffixes = {".py", ".jinja", ".css", ".js"}
    files = sorted(
        path for folder in ("raydali", "jobs") for path in Path(folder).rglob("*") if path.suffix in suffixes
    )
    lines = {path: len(path.read_text().splitlines()) for path in files}
    texts = {path: path.read_text().splitlines() for path in files if path.parts[0] == "jobs" and path.stem != "grid"}
    jobs = [len(text) for text in texts.values()]
    pairs = combinations([[line for line in text if line.strip()] for text in texts.values()], 2)
    common = [SequenceMatcher(None, *pair, autojunk=False).ratio() for pair in pairs]
    documented = [each for path in files if path.suffix == ".py" for each in docstrings(path)]
    tests = [(path, test) for path in sorted(Path("tests").rglob("*.py")) for test in tests_of(path)]
    found = {
        "short": [f"{path}: {count}" for path, count in lines.items() if count < 30 and path.name != "__init__.py"],
        "long": [f"{path}: {count}" for path, count in lines.items() if count > 300],
        **imports(),
        "ray": private_names(),
        "fragments": [
            f"{where}: {line}" for where, line in documented if CONTINUES.match(line) or len(line.split()) < 4
        ],
        "names": [f"{path}:{test.lineno}: {test.name}" for path, test in tests if len(test.name) >= 60],
        "sentences": [f"{path}:{test.lineno}: {test.name}" for path, test in tests if asserts_sentence(test)],
    }
    count = {name: len(items) for name, items in found.items()}
    dependencies = tomllib.loads(Path("pyproject.toml").read_text())["project"]["dependencies"]
    between = sum(item.startswith("raydali: ") for item in found["upwards"])
    shown = (
        f"{sum(lines.values()):,}",
        len(files),
        count["short"],
        count["long"],
        count["circles"],
        f"{between}; {count['upwards']}",
        f"{min(jobs)} .. {max(jobs)}",
        f"{min(common):.0%} .. {max(common):.0%}",
        f"{count['fragments']} of {len(documented)} ({count['fragments'] / len(documented):.0%})",
        len(dependencies),
        count["ray"],
        f"{count['names']} of {len(tests)}",
        f"{count['sentences']} ({count['sentences'] / len(tests):.0%})",
    )
    return dict(zip(GOALS, map(str, shown), strict=True)), found


def imports() -> dict[str, list[str]]:
    """Find circles between files, and of each package the fewest imports to remove for no circle between its parts."""
    import grimp
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    graph = grimp.build_graph("raydali", cache_dir=None)
    names = sorted(graph.modules)
    arrows = [
        (i, names.index(to)) for i, name in enumerate(names) for to in graph.find_modules_directly_imported_by(name)
    ]
    matrix = coo_array(([1] * len(arrows), tuple(zip(*arrows, strict=True))), shape=(len(names), len(names)))
    circles: dict[int, list[str]] = {}
    for name, component in zip(names, connected_components(matrix, connection="strong")[1].tolist(), strict=True):
        circles.setdefault(component, []).append(name)
    upwards = [(name, arrow) for name in names for arrow in sorted(graph.nominate_cycle_breakers(name))]
    return {
        "circles": [", ".join(members) for members in circles.values() if len(members) > 1],
        "upwards": [f"{package}: {importer} -> {imported}" for package, (importer, imported) in upwards],
    }


def docstrings(path: Path) -> list[tuple[str, str]]:
    """List the places and first lines of the docstrings of a file's public modules, classes, functions and methods."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)]
    public = [(node, ast.get_docstring(node)) for node in nodes if not getattr(node, "name", "").startswith("_")]
    return [(f"{path}:{getattr(node, 'lineno', 1)}", text.splitlines()[0]) for node, text in public if text]


def tests_of(path: Path) -> list[ast.FunctionDef]:
    """List the test functions of a file."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def asserts_sentence(test: ast.FunctionDef) -> bool:
    """Return whether a test compares with a text of five words or more, by ==, in or match=."""
    matched = [
        node.value
        for node in ast.walk(test)
        if isinstance(node, ast.keyword)
        and node.arg == "match"
        and not ast.unparse(node.value).startswith("mentioning(")
    ]
    equal = [node for node in ast.walk(test) if isinstance(node, ast.Compare)]
    compared = [node for node in equal if any(isinstance(each, ast.In | ast.NotIn | ast.Eq) for each in node.ops)]
    constants = [node for each in (*matched, *compared) for node in ast.walk(each) if isinstance(node, ast.Constant)]
    return any(isinstance(node.value, str) and len(node.value.split()) >= 5 for node in constants)


def private_names(root: str = "raydali") -> list[str]:
    """Return each name once, with the file that uses it first."""
    found: dict[str, Path] = {}
    trees = {path: ast.parse(path.read_text()) for path in sorted(Path(root).rglob("*.py"))}
    own = {
        name
        for tree in trees.values()
        for node in ast.walk(tree)
        for name in (getattr(node, "name", None), getattr(node, "attr", None) if _is_stored(node) else None)
        if name
    }
    for path, tree in trees.items():
        imported = _imported(tree)
        if not imported:
            continue
        for name in _names(tree, imported, own):
            found.setdefault(name, path)
    return [f"{name}: {path}" for name, path in sorted(found.items())]


def _is_stored(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the local names of what a file imports from Ray, with their full names."""
    result: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            result |= {
                each.asname or "ray": each.name if each.asname else "ray" for each in node.names if _is_ray(each)
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "ray":
            result |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return result


def _is_ray(name: ast.alias) -> bool:
    return name.name.split(".")[0] == "ray"


def _names(tree: ast.Module, imported: dict[str, str], own: set[str]) -> set[str]:
    names = {each for each in imported.values() if _is_private(each)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = _dotted(node, imported)
            if dotted and _is_private(dotted):
                names.add(dotted)
            elif not dotted and _is_underscored(node.attr) and node.attr not in own:
                names.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= set(VARIABLE.findall(node.value))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr", "setattr"):
            words = [each.value for each in node.args[1:2] if isinstance(each, ast.Constant)]
            names |= {word for word in words if isinstance(word, str) and word not in own and len(imported) > 0}
        elif isinstance(node, ast.Tuple) and len(node.elts) > 1 and isinstance(node.elts[1], ast.Constant):
            if isinstance(node.elts[0], ast.Name) and node.elts[0].id in imported:  # what is replaced in a module
                names.add(f"{imported[node.elts[0].id]}.{node.elts[1].value!s}")
        elif isinstance(node, ast.ClassDef):
            bases = [imported.get(getattr(base, "id", ""), "") for base in node.bases]
            if any(bases):
                names |= {
                    f"{base}.{each.name}"
                    for base in filter(None, bases)
                    for each in node.body
                    if isinstance(each, ast.FunctionDef) and not each.name.startswith("__") and _has(base, each.name)
                }
    return {name for name in names if not any(other.startswith(f"{name}.") for other in names)}


def _has(dotted: str, name: str) -> bool:
    """Return whether a class of Ray has this method."""
    module, _, kind = dotted.rpartition(".")
    return hasattr(getattr(importlib.import_module(module), kind), name)


def _is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_private(dotted: str) -> bool:
    return dotted.startswith(UNDOCUMENTED) or any(_is_underscored(each) for each in dotted.split("."))


def _dotted(node: ast.expr, imported: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return imported.get(node.id, "")
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value, imported)
        return f"{before}.{node.attr}" if before else ""
    return ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", metavar="TREE", help="another checkout, whose figures are shown too")
    parser.add_argument("--list", metavar="FIGURE", help="print what a figure counts instead")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    options = parser.parse_args()
    now, found = figures()
    before = dict.fromkeys(GOALS, "")
    if options.against:
        command = [sys.executable, str(Path(__file__).resolve()), "--json"]
        other = {"cwd": options.against, "env": os.environ | {"PYTHONPATH": str(Path(options.against).resolve())}}
        before = json.loads(subprocess.run(command, **other, check=True, stdout=subprocess.PIPE).stdout)
    if options.list or options.json:
        print("\n".join(found[options.list]) if options.list else json.dumps(now))
    else:
        print(f"{'':45}{'before':>18}{'goal':>12}{'now':>18}")
        print("\n".join(f"{name:45}{before[name]:>18}{goal:>12}{now[name]:>18}" for name, goal in GOALS.items()))
