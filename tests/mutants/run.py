"""Changes the code in ways that break what the router promises, and checks that a test notices each one.

Every *.mutant file here holds one change to one .cpp (see read_mutant). The change is compiled by itself and linked
before the libraries of a build that is there already, where the linker keeps the first definition of a name; then the
mutant's tests are run. A mutant that survives (its tests pass), does not apply or does not compile fails the run.

That works only where no function has been inlined across the files of a library: in the build with AddressSanitizer,
which is not optimised.

    ./dev mutants [NAME...]      all of them, or those whose file name contains one of the words
"""

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TESTS_TIMEOUT_S = 180  # of all tests of a mutant; one may make them hang
COMMAND_TIMEOUT_S = 600


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
    def modules(self):
        """Whose test binaries hold the tests: CTest names are <module>.<suite>.<test>."""
        return sorted(set(re.findall(r"\b(base|expert|policy|fleet|net|router|cli)\\\.", self.tests)))


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
    if not mutant.modules:
        sys.exit(f"{path}: the tests '{mutant.tests}' name no module")
    if not mutant.file.endswith(".cpp"):
        sys.exit(f"{path}: {mutant.file} is no .cpp: what includes it would have to be built again")
    return mutant


class Failed(Exception):
    """A command that should have worked; what it printed."""


class Build:
    """A finished build, whose commands are used again for one file and one test binary at a time."""

    def __init__(self, folder, scratch):
        self.folder, self.scratch = folder, scratch
        scratch.mkdir(parents=True, exist_ok=True)
        commands = json.loads((folder / "compile_commands.json").read_text())
        self.compilers = {}  # by module: the command of any of its files; flags are those of the target
        for entry in commands:
            found = re.search(r" -o \S*CMakeFiles/kindred_(\w+)\.dir/", entry["command"])
            if found:
                self.compilers.setdefault(found[1], entry)

    def call(self, command):
        done = subprocess.run(command, cwd=self.folder, shell=isinstance(command, str), capture_output=True,
                              timeout=COMMAND_TIMEOUT_S, check=False)
        if done.returncode != 0:
            raise Failed((done.stdout + done.stderr).decode(errors="replace")[-4000:])
        return done.stdout.decode()

    def compile(self, module, source, output):
        entry = self.compilers[module]
        command = shlex.split(entry["command"])
        command[command.index("-o") + 1] = str(output)
        command[command.index("-c") + 1] = str(source)
        self.call([word for word in command if not word.startswith("-M")])

    def link(self, module, mutated, output):
        """The link command of the module's tests, with one more object in front."""
        target = f"{module}_test"
        command = self.call(["ninja", "-t", "commands", target]).strip().splitlines()[-1]
        command, linked = re.subn(rf" -o {target}\b", f" {mutated} -Wl,-z,muldefs -o {output}", command)
        if linked != 1:
            raise Failed(f"no link command of {target} in {self.folder}")
        # What CMake appends: finding the tests by running them.
        self.call(re.split(r" && cd ", command)[0])

    def tests(self, module, regex):
        """Names for --gtest_filter of those that the CTest regex means."""
        out, suite = [], ""
        for line in self.call([str(self.folder / f"{module}_test"), "--gtest_list_tests"]).splitlines():
            name = line.split("#")[0].rstrip()
            if not name.startswith(" "):
                suite = name
            elif re.search(regex, f"{module}.{suite}{name.strip()}"):
                out.append(suite + name.strip())
        return out

    def passes(self, binary, names):
        """Whether the tests pass. Two definitions of a name, which the sanitizer would mind, are the point here."""
        try:
            done = subprocess.run([binary, f"--gtest_filter={':'.join(names)}", "--gtest_fail_fast"],
                                  env={**os.environ, "ASAN_OPTIONS": "detect_odr_violation=0"}, capture_output=True,
                                  timeout=TESTS_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def try_mutant(build, mutant):
    """What is wrong: '' if its tests pass without it and fail with it."""
    path = ROOT / mutant.file
    text = path.read_text() if path.is_file() else ""
    if (found := text.count(mutant.find)) != 1:
        return f"does not apply: its text is {found} times in {mutant.file}"
    source = build.scratch / f"{mutant.name}.cpp"
    mutated = build.scratch / f"{mutant.name}.o"
    source.write_text(f'#line 1 "{path}"\n' + text.replace(mutant.find, mutant.replace))
    try:
        build.compile(path.parent.name, source, mutated)
        noticed = False
        for module in mutant.modules:
            names = build.tests(module, mutant.tests)
            if not names:
                return f"its tests {mutant.tests} name none of {module}"
            if not build.passes(build.folder / f"{module}_test", names):
                return f"the tests {mutant.tests} fail without it"
            binary = build.scratch / f"{mutant.name}-{module}"
            build.link(module, mutated, binary)
            noticed = noticed or not build.passes(binary, names)
            binary.unlink()
        return "" if noticed else f"SURVIVED: no test of {mutant.tests} noticed"
    except Failed as failed:
        return f"does not build:\n{failed}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="words that a mutant's file name must contain one of")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/asan", help="a build with its tests")
    parser.add_argument("--scratch", type=pathlib.Path, default=ROOT / "build/mutants", help="where to compile")
    options = parser.parse_args()

    mutants = [read_mutant(path) for path in sorted(HERE.glob("*.mutant"))]
    mutants = [m for m in mutants if not options.names or any(word in m.name for word in options.names)]
    if not mutants:
        sys.exit("no such mutant")
    build = Build(options.build.resolve(), options.scratch.resolve())
    began = time.monotonic()
    failures = 0
    # Tests of the router open ports of their own and wait more than they compute, so two at a time do not meet.
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for mutant, problem in zip(mutants, pool.map(lambda m: try_mutant(build, m), mutants)):
            failures += bool(problem)
            print(f"{mutant.behaviour:>2}  {'FAIL' if problem else 'ok  '}  {mutant.title}", flush=True)
            if problem:
                print("    " + problem.replace("\n", "\n    "), flush=True)
    print(f"{len(mutants) - failures} of {len(mutants)} mutants noticed, {time.monotonic() - began:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
