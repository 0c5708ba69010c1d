"""A small HTTP server with the endpoints the lease needs, for its tests: starts a grandchild, can die on purpose.

usage: toy_server.py PORT [--die-at-start] [--die-after N] [--slow SECONDS] [--ignore-term] [--hang-chat-stream]
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
parser.add_argument("--hang-chat-stream", action="store_true")
parser.add_argument("--die-on-hang", action="store_true", help="die where a streaming request would hang")
parser.add_argument("--sign", help="file that is made when a streaming request hangs")
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
        if self.path not in ("/health", "/version"):
            self.send_error(404)
            return
        self.answer({"version": "1.2.3", "pid": os.getpid()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if not self.path.endswith("completions"):
            self.send_error(404)
            return
        if options.hang_chat_stream and body.get("stream"):
            if options.sign:
                open(options.sign, "w").close()
            if options.die_on_hang:
                print("toy server: dying as told", flush=True)
                os._exit(7)
            time.sleep(600)
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
