"""Changes the code in ways that break what the router promises, and checks that a test notices each one.

Every *.mutant file here holds one change (see read_mutant). They are applied one at a time to a copy of the
source tree, in a build of its own; what a change touches is rebuilt and its tests are run. A mutant that
survives (its tests pass), does not apply or does not compile fails the run.

    ./dev mutants [NAME...]      all of them, or those whose file name contains one of the words
"""

import argparse
import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TEST_TIMEOUT_S = 60  # of one test; a mutant may make it hang
SOURCES = ("CMakeLists.txt", "CMakePresets.json", "cmake", "src", "tests/data")


@dataclasses.dataclass
class Mutant:
    name: str
    behaviour: str
    title: str
    file: str
    tests: str
    find: str
    replace: str

    @property
    def targets(self):
        """The test binaries: CTest names are <module>.<suite>.<test>."""
        modules = re.findall(r"\b(base|expert|policy|fleet|net|router|cli)\\\.", self.tests)
        return sorted({f"{module}_test" for module in modules})


def read_mutant(path):
    """Header lines `behaviour:`, `title:`, `file:`, `tests:` (a CTest regex), then the exact text to find and
    what to put in its place, each behind a line of its own: `--- find` and `--- replace`."""
    header, _, rest = path.read_text().partition("--- find\n")
    find, _, replace = rest.partition("--- replace\n")
    fields = dict(line.split(": ", 1) for line in header.splitlines() if line.strip())
    missing = {"behaviour", "title", "file", "tests"} - fields.keys()
    if missing or not find:
        sys.exit(f"{path}: no {', '.join(sorted(missing)) or 'text to find'}")
    mutant = Mutant(path.stem, fields["behaviour"], fields["title"], fields["file"], fields["tests"], find, replace)
    if not mutant.targets:
        sys.exit(f"{path}: the tests '{mutant.tests}' name no module")
    return mutant


class Tree:
    """A copy of the sources and its build."""

    def __init__(self, root):
        self.source, self.build = root / "src", root / "build"
        self.log = root / "log"
        self.environment = {**os.environ, "CCACHE_BASEDIR": str(root), "CCACHE_NOHASHDIR": "1"}

    def copy_sources(self):
        listed = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *SOURCES],
                                cwd=ROOT, check=True, capture_output=True).stdout.decode().split("\0")
        wanted = {name for name in listed if name and (ROOT / name).is_file()}
        for name in wanted:
            self.put(name, (ROOT / name).read_bytes())
        for path in [p for p in self.source.rglob("*") if p.is_file()]:
            if str(path.relative_to(self.source)) not in wanted:
                path.unlink()

    def put(self, name, data):
        """Only what differs is written: the build goes by time stamps."""
        path = self.source / name
        if path.is_file() and path.read_bytes() == data:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def run(self, *command):
        with self.log.open("wb") as log:
            return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=self.environment,
                                  check=False).returncode == 0

    def tail(self, lines=25):
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def configure(self):
        # Without optimisation and debug information: compiled often, run once.
        return self.run("cmake", "-S", self.source, "-B", self.build, "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Debug",
                        "-DCMAKE_CXX_FLAGS_DEBUG=-O0", "-DKINDRED_ENGINE=OFF")

    def compile(self, targets):
        return self.run("cmake", "--build", self.build, "-j", str(os.cpu_count()), "--target", *targets)

    def test(self, regex):
        return self.run("ctest", "--test-dir", self.build, "-R", regex, "--no-tests=error", "--output-on-failure",
                        "--stop-on-failure", "--timeout", str(TEST_TIMEOUT_S), "-j", str(os.cpu_count()))


def try_mutant(tree, mutant):
    """What became of it: '' if a test noticed, else what is wrong."""
    original = (tree.source / mutant.file).read_bytes() if (tree.source / mutant.file).is_file() else None
    if original is None:
        return f"does not apply: there is no {mutant.file}"
    text = original.decode()
    if (found := text.count(mutant.find)) != 1:
        return f"does not apply: its text is {found} times in {mutant.file}"
    try:
        tree.put(mutant.file, text.replace(mutant.find, mutant.replace).encode())
        if not tree.compile(mutant.targets):
            return "does not compile:\n" + tree.tail()
        return "" if not tree.test(mutant.tests) else "SURVIVED: no test of " + mutant.tests + " noticed"
    finally:
        tree.put(mutant.file, original)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words that a mutant's file name must contain one of")
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "build/mutants", help="where to copy and build")
    parser.add_argument("--clean", action="store_true", help="from an empty scratch folder")
    options = parser.parse_args()

    mutants = [read_mutant(path) for path in sorted(HERE.glob("*.mutant"))]
    mutants = [m for m in mutants if not options.names or any(word in m.name for word in options.names)]
    if not mutants:
        sys.exit("no such mutant")
    if options.clean:
        shutil.rmtree(options.scratch, ignore_errors=True)
    options.scratch.mkdir(parents=True, exist_ok=True)
    tree = Tree(options.scratch.resolve())
    began = time.monotonic()
    tree.copy_sources()
    if not tree.configure() or not tree.compile(sorted({t for m in mutants for t in m.targets})):
        sys.exit("the unchanged tree does not build:\n" + tree.tail(60))
    print(f"built in {time.monotonic() - began:.0f} s; {len(mutants)} mutants", flush=True)
    if not tree.test("|".join(sorted({m.tests for m in mutants}))):
        sys.exit("the tests fail without a mutant:\n" + tree.tail(60))

    failures = 0
    for mutant in mutants:
        start = time.monotonic()
        problem = try_mutant(tree, mutant)
        failures += bool(problem)
        print(f"{mutant.behaviour:>2}  {'ok  ' if not problem else 'FAIL'} {time.monotonic() - start:5.0f} s  {mutant.title}",
              flush=True)
        if problem:
            print("    " + problem.replace("\n", "\n    "), flush=True)
    print(f"{len(mutants) - failures} of {len(mutants)} mutants noticed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
