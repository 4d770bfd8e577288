#!/bin/sh
# Installs what tests/deploy/test_compose_run.py starts containers with, where it is missing.
set -eu
for program in dockerd mmdebstrap prometheus ip curl; do
    command -v "$program" >/dev/null || missing=1
done
[ -z "${missing:-}" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "install-engine.sh: needs root and apt-get; the tests will say what they miss" >&2
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    docker.io mmdebstrap prometheus iproute2 iptables curl >/dev/null
