#!/bin/sh
# Make sure that the few system packages the set-up needs are there: through apt when root, otherwise one clear line.
# usage: system_packages.sh [PYTHON]      what every command needs; exit 3 when something is missing
#        system_packages.sh --image       what building and running the image needs; without it a release is measured
#                                         from the source tree, so that this form only says what is missing
set -u
missing=""
need() { command -v "$1" >/dev/null 2>&1 || missing="$missing $2"; }

install() {
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1 || return 1
    echo "installing system packages:$missing"
    export DEBIAN_FRONTEND=noninteractive
    # shellcheck disable=SC2086
    apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing >/dev/null
}

if [ "${1:-}" = --image ]; then
    need mmdebstrap mmdebstrap
    need bwrap bubblewrap
    need docker-registry docker-registry
    # A machine with a GPU runs the image with podman or docker.
    command -v nvidia-smi >/dev/null 2>&1 && need skopeo skopeo
    [ -z "$missing" ] && exit 0
    install && exit 0
    echo "note: without these packages no image is built, and the release is measured from the source tree:$missing" \
        "(sudo apt-get install$missing)" >&2
    exit 0
fi

python=${1:-python3}
need git git
# vLLM's CPU build and torch.compile compile C++ at run time.
need g++ g++
if command -v "$python" >/dev/null 2>&1; then
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || missing="$missing python3-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing="$missing python3-dev"
else
    missing="$missing python3 python3-venv python3-dev"
fi
[ -z "$missing" ] && exit 0
install && exit 0
echo "error: these system packages are missing:$missing; install them: sudo apt-get install$missing" >&2
exit 3
