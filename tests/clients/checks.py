"""What the scripts of the Python clients share: arguments, and one line of JSON for each check."""

import argparse
import json
import time
import urllib.request


class Checks:
    """`text`: a router before workers with the bundled model. `engine`: one before engines that have tools and the
    like (tests/e2e/scripted_engine.py)."""

    def __init__(self, version):
        parser = argparse.ArgumentParser()
        parser.add_argument("--text", required=True)
        parser.add_argument("--engine", required=True)
        args = parser.parse_args()
        self.text, self.engine = args.text, args.engine
        self.model, self.engine_model = self.only_model(self.text), self.only_model(self.engine)
        self._say({"version": version})

    @staticmethod
    def _say(line):
        print(json.dumps(line), flush=True)

    @staticmethod
    def only_model(url):
        with urllib.request.urlopen(url + "/v1/models", timeout=30) as answer:
            return json.load(answer)["data"][0]["id"]

    def check(self, function):
        """A decorator: runs the check at once."""
        name = function.__name__.replace("_", " ")
        try:
            function()
            self._say({"check": name, "ok": True})
        except Exception as error:  # whatever it is, the others are still of interest
            self._say({"check": name, "ok": False, "error": f"{type(error).__name__}: {error}"[:500]})
        return function

    def wait_idle(self):
        """Until no worker has a request of the router's any more."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            with urllib.request.urlopen(self.text + "/status", timeout=30) as answer:
                if all(worker["in_flight"] == 0 for worker in json.load(answer)["workers"]):
                    return
            time.sleep(0.05)
        raise AssertionError("a request that its client gave up is still at a worker")


ASK = [{"role": "user", "content": "Write a short story about the sea."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": PARAMETERS}}]


def raises(error, function):
    try:
        function()
    except error as caught:
        return caught
    raise AssertionError(f"no {error.__name__}")
