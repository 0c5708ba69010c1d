"""A small HTTP server with the endpoints the lease needs, for its tests: starts a grandchild, can die on purpose.

usage: toy_server.py PORT [--die-at-start] [--die-after N] [--slow SECONDS] [--ignore-term]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("port", type=int)
parser.add_argument("--die-at-start", action="store_true")
parser.add_argument("--die-after", type=int, default=-1)
parser.add_argument("--slow", type=float, default=0.0)
parser.add_argument("--ignore-term", action="store_true")
options, rest = parser.parse_known_args()
served = 0


class Handler(BaseHTTPRequestHandler):
    def answer(self, value: object) -> None:
        global served
        served += 1
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        if served == options.die_after:
            print("toy server: dying as told", flush=True)
            os._exit(7)

    def do_GET(self) -> None:
        self.answer({"version": "1.2.3", "pid": os.getpid()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.answer({"choices": [{"text": "x"}], "usage": {"completion_tokens": body.get("max_tokens", 1)}})

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    if options.die_at_start:
        print("toy server: no such weights", flush=True)
        sys.exit(5)
    if options.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    # A grandchild in a session of its own: what a careless engine leaves behind.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *rest], start_new_session=True)
    time.sleep(options.slow)
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


main()
