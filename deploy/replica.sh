#!/bin/sh
# heterps-replica ROLE [OPTION...]: a shard or a node of a service that may be scaled.
#
# Each container goes by its own name, such as heterps-ps-2: the others can resolve it, and it stays
# when the container is restarted or made anew. What the role keeps is in /state/NAME.
set -eu

address=$(getent hosts "$(cat /etc/hostname)")
# Of the engine's DNS alone: /etc/hosts would answer with the container's id.
found=$(getent -s dns hosts "${address%% *}") || {
    echo "heterps-replica: the engine's DNS has no name for ${address%% *}" >&2
    exit 1
}
name=${found##* }
name=${name%%.*}

case $1 in
ps) set -- "$@" --data "/state/$name" ;;
node) set -- "$@" --directory "/state/$name" ;;
*) echo "heterps-replica: $1: expected ps or node" >&2 && exit 2 ;;
esac
exec heterps "$@" --advertise "$name"
