#!/usr/bin/env python3
"""Pins a client and all it needs: `tests/clients/lock.py guidellm guidellm==0.8.1 --without torch`.

Asks pip what it would install here (x86-64, CPython 3.11), and writes requirements/clients-NAME.txt with the versions
and the hashes of those files. Such a list is installed with --no-deps. `--without` leaves a package out, and what only
that one needs, because the client does its work without it.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def resolve(python, specs, options):
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run", "--ignore-installed",
         "--only-binary", ":all:", "--report", "-", *options, *specs],
        check=True, stdout=subprocess.PIPE)
    return {canonical(item["metadata"]["name"]): item for item in json.loads(done.stdout)["install"]}


def reachable(items, without):
    """The requested ones, and what they need by way of packages that are not left out."""
    todo = [name for name, item in items.items() if item["requested"] and name not in without]
    kept = set()
    while todo:
        name = todo.pop()
        if name in kept:
            continue
        kept.add(name)
        for line in items[name]["metadata"].get("requires_dist", []):
            needed = canonical(re.match(r"[A-Za-z0-9._-]+", line).group())
            # Markers and extras are pip's to judge: what it would not install is not in `items`.
            if needed in items and needed not in without:
                todo.append(needed)
    return kept


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("name")
    parser.add_argument("specs", nargs="+", help="what to install: guidellm==0.8.1")
    parser.add_argument("--without", action="append", default=[], help="a package that is not needed")
    parser.add_argument("--ignore-requires-python", action="store_true", help="pin though the package asks for another Python")
    args = parser.parse_args()
    without = {canonical(name) for name in args.without}
    options = ["--ignore-requires-python"] if args.ignore_requires_python else []
    items = resolve(sys.executable, args.specs, options)
    kept = reachable(items, without)
    lines = ["# For ./dev test-clients: CPython 3.11 on x86-64 Linux. Installed with --no-deps. Made by",
             "#   tests/clients/lock.py " + " ".join(sys.argv[1:]), ""]
    for name in sorted(kept):
        item = items[name]
        lines.append(f"{name}=={item['metadata']['version']} \\")
        lines.append(f"    --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}")
    (ROOT / f"requirements/clients-{args.name}.txt").write_text("\n".join(lines) + "\n")
    print(f"{len(kept)} packages")


if __name__ == "__main__":
    main()
