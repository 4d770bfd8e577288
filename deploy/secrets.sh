#!/bin/sh
# ./secrets.sh [NAME...]: makes what the parts of the cluster show each other, once, in ./secrets.
#
# NAME is what clients call the scheduler's machine by, when they are elsewhere. The files can be
# read by the containers' user, and on this machine by nobody else: only you can enter the folder.
# To make everything anew, remove the folder first; every container must then be made anew.
set -eu
umask 077
cd "$(dirname "$0")"
folder=${SECRETS:-./secrets}
mkdir -p "$folder"

random() {
    od -An -N24 -tx1 /dev/urandom | tr -d ' \n'
}

for name in "$@"; do
    shift
    set -- "$@" --host "$name"
done
[ -s "$folder/metrics-token" ] || random >"$folder/metrics-token"
[ -s "$folder/redis-url" ] || {
    password=$(random)
    printf %s "$password" >"$folder/redis-password"
    printf 'redis://:%s@redis:6379/0' "$password" >"$folder/redis-url"
}
docker compose run --rm --user "$(id -u):$(id -g)" certs certs /secrets --if-missing "$@" >/dev/null
chmod 644 "$folder"/*
echo "made in $folder:" "$(ls "$folder" | tr '\n' ' ')"
