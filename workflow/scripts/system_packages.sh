#!/bin/sh
# Make sure that the few system packages the set-up needs are there: through apt when root, otherwise one clear line.
# usage: system_packages.sh [PYTHON]
set -u
python=${1:-python3}
missing=""
command -v git >/dev/null 2>&1 || missing="$missing git"
# vLLM's CPU build and torch.compile compile C++ at run time.
command -v g++ >/dev/null 2>&1 || missing="$missing g++"
if command -v "$python" >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="$missing python3-dev"
else
    missing="$missing python3 python3-venv python3-dev"
fi
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing system packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null; then
        exit 0
    fi
fi
echo "error: these system packages are missing:$missing; install them: sudo apt-get install$missing" >&2
exit 3
